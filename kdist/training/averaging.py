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
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.requests import NAMES, Requests


class _Averaged(NamedTuple):
    """A variable that is averaged.

    Attributes:
        variable: the model's variable.
        common: `tf.Variable`, what all ranks had after the last average.
        is_weight: bool, whether it was trained when it was first averaged.
    """

    variable: keras.Variable
    common: tf.Variable
    is_weight: bool


class Averaging:
    """Averages a model's weights over the ranks after every so many steps, in `fit`.

    In between each rank makes steps of its own, on its own rows. What the ranks have moved away from the last common
    weights is, in the mean, an outer gradient, which is applied to the common weights by SGD, with Nesterov's momentum
    if there is any. With a rate of 1 and no momentum that is the mean of the weights. Statistics (batch norm) are
    averaged with them; what the optimizers keep (momentum), at the end of a pass over the data and where a backup is
    saved: there all ranks hold the same.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks talk to each other.
        requests: `Requests`, what this rank's callbacks ask of all ranks.
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
        requests: Requests,
        *,
        every: int,
        learning_rate: float,
        momentum: float,
        bucket_mb: float | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._requests = requests
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
        for variable, common, _ in self._averaged.values():
            common.assign(variable)

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

    def come_together(self) -> bool:
        """Averages now, what the optimizers keep too: afterwards all ranks hold the same.

        Collective: every rank must call this, in the same order.

        Returns:
            Whether they do: not if a rank asks all others to take over its weights.
        """
        self._requests.send()
        # Asked of all: a pass that was broken off may have ended at another step on each rank.
        (num_steps,) = self._engine.allreduce([tf.convert_to_tensor(self._num_steps)])
        asked = self._average(self._requests.sent) if num_steps > 0 else tf.zeros([len(NAMES)])
        kept = [
            variable
            for optimizer in optimizers_of(self._model)
            for variable in optimizer.variables
            if "float" in str(variable.dtype) and variable is not getattr(innermost(optimizer), "_learning_rate", None)
        ]
        values = [tf.convert_to_tensor(each) for each in kept]
        means = self._engine.allreduce([each / tf.cast(self._engine.size, each.dtype) for each in values])
        for variable, mean in zip(kept, means, strict=True):
            variable.assign(mean)
        return not _takes_over(asked)

    def end(self) -> None:
        """Ends a pass over the data.

        Collective: every rank must call this, in the same order.
        """
        self.is_open = False
        if self.come_together() and not self._is_checked:
            self._is_checked = True
            state.check_equal(self._engine, {v.path: v for v in self._model.trainable_variables})

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
        moved = [self._moved(each) for each in averaged]
        weights = [place for place, each in enumerate(averaged) if each.is_weight]
        others = [place for place, each in enumerate(averaged) if not each.is_weight]
        sums, (*totals, asked) = self._wire.sum(
            [moved[place] for place in weights],
            [*(moved[place] for place in others), requests],
            variables=[averaged[place].variable for place in weights],
        )
        takes_over = _takes_over(asked)
        for place, total in zip([*weights, *others], [*sums, *totals], strict=True):
            variable, common, is_weight = averaged[place]
            if is_weight and self._momentum:
                velocity = self._velocities.of(variable, common.shape, common.dtype)
                velocity.assign(tf.where(takes_over, velocity, self._momentum * velocity + total))
                total += self._momentum * velocity
            value = common + (self._learning_rate * total if is_weight else total)
            common.assign(tf.where(takes_over, variable, value))
            variable.assign(common)
        self._num_steps.assign(0)
        return asked

    def _moved(self, averaged: _Averaged) -> tf.Tensor:
        """Returns this rank's addend to what the ranks have moved: of what nobody has written it is exactly 0."""
        variable, common, _ = averaged
        moved = variable - common
        if variable.aggregation == "sum":
            return moved
        if variable.aggregation == "only_first_replica":
            return moved if self._engine.rank == 0 else tf.zeros_like(moved)
        return moved / tf.cast(self._engine.size, moved.dtype)

    def _note_variables(self) -> None:
        weights = self._model.trainable_variables
        statistics = [
            each
            for each in internals.state_variables(self._model)
            if "float" in str(each.dtype) or each.aggregation == "sum"
        ]
        for variable in [*weights, *statistics]:
            if id(variable) not in self._averaged:
                with tf.init_scope():
                    common = tf.Variable(
                        tf.convert_to_tensor(variable), trainable=False, experimental_enable_variable_lifting=False
                    )
                self._averaged[id(variable)] = _Averaged(variable, common, any(variable is each for each in weights))


def _takes_over(asked: tf.Tensor) -> tf.Tensor:
    """Returns whether a rank asks all others to take over its weights, a `bool` scalar."""
    return asked[NAMES.index("weights")] > 0
