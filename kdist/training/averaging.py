"""`sync_every`: ranks that train by themselves, and average their weights from time to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.kept_state import KeptState
from kdist.gradients.wire import Wire
from kdist.training import _keras_internals as internals
from kdist.training import state
from kdist.training.assigned_state import is_merged
from kdist.training.optimizers import is_learning_rate, optimizers_of
from kdist.training.requests import NAMES


class _Averaged(NamedTuple):
    """A variable that is averaged.

    Attributes:
        variable: the model's variable.
        common: `tf.Variable`, what all ranks had after the last average.
        is_weight: bool, whether it was trained when it was first averaged: the outer SGD works on these.
        is_frozen: bool, whether nothing is known to write it: it is sent only if a rank has.
    """

    variable: keras.Variable
    common: tf.Variable
    is_weight: bool
    is_frozen: bool


class Averaging:
    """Averages a model's weights over the ranks after every so many steps, in `fit`.

    In between each rank makes steps of its own, on its own rows. What the ranks have moved away from the last common
    weights is, in the mean, an outer gradient, which is applied to the common weights by SGD, with Nesterov's momentum
    if there is any. With a rate of 1 and no momentum that is the mean of the weights. Statistics (batch norm), and
    frozen weights that a step of the user's has written, are averaged with them; what the optimizers keep (momentum),
    at the end of a pass over the data and where a backup is saved: there all ranks hold the same.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks talk to each other.
        every: int, how many steps a rank makes by itself.
        learning_rate: float, of the outer SGD.
        momentum: float, of the outer SGD.
        bucket_mb: float or `None`, megabytes from which on a message is sent.

    Attributes:
        is_open: bool, whether the ranks' weights may differ.

    References:
        - Stich, 2019, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767
        - Douillard et al., 2023, DiLoCo, https://arxiv.org/abs/2311.08105
    """

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        *,
        every: int,
        learning_rate: float,
        momentum: float,
        bucket_mb: float | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._wire = Wire(engine, bucket_mb=bucket_mb)
        self._every = every
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._averaged: dict[int, _Averaged] = {}  # by the ids of the model's variables
        self._velocities = KeptState(tf.zeros)
        self._is_checked = False
        self.is_open = False
        with tf.init_scope():
            self._num_steps = tf.Variable(0, trainable=False, dtype=tf.int64)  # since the last average

    def begin(self) -> None:
        """Begins from weights that all ranks have in common."""
        self.is_open = True
        self._num_steps.assign(0)
        self._note_variables()
        for each in self._averaged.values():
            each.common.assign(each.variable)

    def after_step(self, requests: tf.Tensor, grant: Callable[[tf.Tensor], None]) -> None:
        """Counts a step, and averages if it is due.

        Collective: every rank must call this, in the same order.

        Args:
            requests: tensor, what this rank's callbacks ask for; the first ones as in `Requests`.
            grant: callable that is given the sum of what all ranks ask for.
        """
        self._note_variables()
        self._num_steps.assign_add(1)
        tf.cond(self._num_steps >= self._every, lambda: grant(self._average(requests)), lambda: None)

    def come_together(self) -> None:
        """Averages now, what the optimizers keep too: afterwards all ranks hold the same.

        Collective: every rank must call this, in the same order.
        """
        # Asked of all: a pass that was broken off may have ended at another step on each rank.
        (num_steps,) = self._engine.allreduce([tf.convert_to_tensor(self._num_steps)])
        if num_steps > 0:
            self._average(tf.zeros([len(NAMES)]))
        optimizers = optimizers_of(self._model)
        kept = [each for optimizer in optimizers for each in optimizer.variables if is_merged(each)]
        kept = [each for each in kept if not is_learning_rate(each, optimizers)]
        values = [tf.convert_to_tensor(each) for each in kept]
        means = self._engine.allreduce([each / tf.cast(self._engine.size, each.dtype) for each in values])
        for variable, mean in zip(kept, means, strict=True):
            variable.assign(mean)

    def end(self) -> None:
        """Ends a pass over the data.

        Collective: every rank must call this, in the same order.
        """
        self.is_open = False
        self.come_together()
        if not self._is_checked:
            self._is_checked = True
            averaged = [each.variable for each in self._averaged.values()]
            state.check_equal(self._engine, {variable.path: variable for variable in averaged})

    def take(self) -> dict[str, dict[int, Any]]:
        """Returns what the outer SGD keeps, equal on all ranks, by the ids of the model's variables."""
        velocities = self._velocities.values.items()
        return {"velocity": {key: tf.convert_to_tensor(each).numpy() for key, each in velocities}}

    def give(self, taken: Mapping[str, Mapping[int, Any]]) -> None:
        """Gives back what `take` has returned; an empty mapping makes it begin anew."""
        self._velocities.give(taken.get("velocity", {}))

    def _average(self, requests: tf.Tensor) -> tf.Tensor:
        """Averages, unless a rank asks the others to take over its weights; returns what all ranks ask for."""
        averaged = list(self._averaged.values())
        weights = [each for each in averaged if each.is_weight]
        statistics = [each for each in averaged if not each.is_weight and not each.is_frozen]
        frozen = [each for each in averaged if each.is_frozen]
        moved = [self._moved(each) for each in frozen]
        is_written = tf.reduce_any([False, *(tf.reduce_any(each.variable.value != each.common) for each in frozen)])
        sums, (*totals, asked, num_writers) = self._wire.sum(
            [self._moved(each) for each in weights],
            [*map(self._moved, statistics), requests, tf.cast(is_written, requests.dtype)],
            variables=[each.variable for each in weights],
        )
        takes_over = asked[NAMES.index("weights")] > 0
        for each, total in zip(weights, sums, strict=True):
            value = self._constrained(each.variable, each.common + self._outer_step(each, total, takes_over))
            _agree(each, value, takes_over)
        for each, total in zip(statistics, totals, strict=True):
            _agree(each, each.common + total, takes_over)

        def merge_frozen() -> None:
            for each, total in zip(frozen, self._engine.allreduce(moved), strict=True):
                _agree(each, each.common + total, takes_over)

        if frozen:
            tf.cond(num_writers > 0, merge_frozen, lambda: None)
        self._num_steps.assign(0)
        return asked

    def _outer_step(self, averaged: _Averaged, total: tf.Tensor, takes_over: tf.Tensor) -> tf.Tensor:
        """Returns by how much the outer SGD moves a weight that the ranks have moved by `total`, in the mean."""
        if self._momentum:
            exact = tf.float32 if total.dtype.size < tf.float32.size else total.dtype
            velocity = self._velocities.of(averaged.variable, total.shape, exact)
            moved = tf.cast(total, exact)
            velocity.assign(tf.where(takes_over, velocity, self._momentum * velocity + moved))
            total = tf.cast(moved + self._momentum * velocity, total.dtype)
        return self._learning_rate * total

    @staticmethod
    def _constrained(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        return value if variable.constraint is None else variable.constraint(value)

    def _moved(self, averaged: _Averaged) -> tf.Tensor:
        """Returns this rank's addend to what the ranks have moved: of what nobody has written it is exactly 0."""
        variable = averaged.variable
        moved = variable - averaged.common
        if variable.aggregation == "sum":
            return moved
        if variable.aggregation == "only_first_replica":
            return moved if self._engine.rank == 0 else tf.zeros_like(moved)
        return moved / tf.cast(self._engine.size, moved.dtype)

    def _note_variables(self) -> None:
        written = {id(each) for each in internals.state_variables(self._model)}
        trained = {id(each) for each in self._model.trainable_variables}
        for variable in self._model.weights:
            if not is_merged(variable):
                continue
            # The scales of float8 layers are trained by other means.
            is_weight = id(variable) in trained and not getattr(variable, "overwrite_with_gradient", False)
            is_frozen = id(variable) not in trained | written
            if known := self._averaged.get(id(variable)):
                common = known.common
            else:
                with tf.init_scope():
                    common = tf.Variable(
                        tf.convert_to_tensor(variable), trainable=False, experimental_enable_variable_lifting=False
                    )
            self._averaged[id(variable)] = _Averaged(variable, common, is_weight, is_frozen)


def _agree(averaged: _Averaged, value: tf.Tensor, takes_over: tf.Tensor) -> None:
    """Gives a variable what all ranks have in common from now on; if one will give all its own, it stays."""
    averaged.common.assign(tf.where(takes_over, averaged.variable, value))
    averaged.variable.assign(averaged.common)
