"""Local SGD (`sync_every`): ranks train without a reduction of gradients, and average their weights periodically."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist.data.batch import Shard
from kdist.engines.engine import Engine
from kdist.engines.tensors import flat
from kdist.engines.tensors.unlifted import unlifted_variable
from kdist.errors import StrategyError
from kdist.gradients.reducer import GradientReducer
from kdist.keras_hooks.optimizers import innermost, is_learning_rate, optimizers_of
from kdist.keras_hooks.trainer import runs_eagerly
from kdist.keras_hooks.variables import (
    aggregation_of,
    is_of_one_rank,
    key_of,
    path_of,
    raw_variable,
    statistics_of_keras,
)
from kdist.state.comparison import check_equal, first_difference
from kdist.state.slots import Slots
from kdist.state.votes import NAMES
from kdist.state.written import WrittenState
from kdist.step.buffers import BufferSync, is_mergeable, summable
from kdist.step.reduce import Reduce
from kdist.step.train_step import TrainStep
from kdist.step.update import Update, UpdatePipeline
from kdist.strategies.all_reduce import AllReduceExtended


class _AveragedVariable(NamedTuple):
    """A variable that is averaged.

    Attributes:
        variable: `keras.Variable`, or a `tf.Variable` that a step writes.
        common: `tf.Variable`, the value on all ranks after the last average.
        is_weight: bool, whether the outer SGD updates it: it was trained when it was first averaged.
        is_frozen: bool, whether no layer is known on all ranks to write it: it is sent only if a rank has written it.
    """

    variable: Any
    common: tf.Variable
    is_weight: bool
    is_frozen: bool


class LocalSGD:
    """Averages a model's weights over the ranks every `sync_every` steps of `fit`.

    In between each rank trains on its own rows. The mean change of the weights since the last average is the
    outer gradient, which an outer SGD (with Nesterov's momentum) applies to the last common weights. With a rate of 1
    and no momentum this is the mean of the weights. Statistics (batch norm), and frozen weights that a custom step has
    written, are averaged with them. Optimizer variables are averaged at the end of a pass over the data and when a
    backup is saved.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks communicate.
        written: `WrittenState` of the model's steps.
        every: int, the number of steps between two averages.
        learning_rate: float, of the outer SGD.
        momentum: float, of the outer SGD.
        bucket_mb: float or `None`, the size from which a message is sent.

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
        written: WrittenState,
        *,
        every: int,
        learning_rate: float,
        momentum: float,
        bucket_mb: float | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._written = written
        self._reducer = GradientReducer(engine, bucket_mb=bucket_mb)
        self._every = every
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._variables: dict[int, _AveragedVariable] = {}  # by the ids of the model's variables
        self._velocities = Slots(tf.zeros)
        self._is_checked = False
        self.is_open = False
        with tf.init_scope():
            self._num_steps = tf.Variable(0, trainable=False, dtype=tf.int64)  # since the last average

    def begin(self) -> None:
        """Stores the weights, which are equal on all ranks, as the common ones."""
        self.is_open = True
        self._num_steps.assign(0)
        self._add_variables()
        for each in self._variables.values():
            each.common.assign(each.variable)

    def after_step(self, votes: tf.Tensor, apply_votes: Callable[[tf.Tensor], None]) -> None:
        """Counts a step, and averages if it is due.

        Collective: every rank must call this, in the same order.
        """
        self._add_variables()
        self._num_steps.assign_add(1)
        tf.cond(self._num_steps >= self._every, lambda: apply_votes(self._average(votes)), lambda: None)

    def average_all(self) -> None:
        """Averages now, optimizer variables too: the ranks are equal afterwards.

        Collective: every rank must call this, in the same order.
        """
        # The ranks of an interrupted pass may have stopped at different steps.
        (num_steps,) = self._engine.allreduce([tf.convert_to_tensor(self._num_steps)])
        if num_steps > 0:
            self._average(tf.zeros([len(NAMES)]))
        optimizers = optimizers_of(self._model)
        slots = [each for optimizer in optimizers for each in optimizer.variables if is_mergeable(each)]
        slots = [each for each in slots if not is_learning_rate(each, optimizers)]
        values = [tf.convert_to_tensor(each) for each in slots]
        means = self._engine.allreduce([each / tf.cast(self._engine.size, each.dtype) for each in values])
        for variable, mean in zip(slots, means, strict=True):
            variable.assign(mean)

    def end(self) -> None:
        """Ends a pass over the data.

        Collective: every rank must call this, in the same order.
        """
        self.is_open = False
        self.average_all()
        if not self._is_checked:
            self._is_checked = True
            averaged = [each.variable for each in self._variables.values()]
            check_equal(self._engine, {path_of(variable): variable for variable in averaged})

    def average_loaded(self) -> None:
        """Averages weights that all ranks have loaded or set, by the mean: the outer SGD is for changes by training.

        Collective: every rank must call this, in the same order.
        """
        if first_difference(self._engine, [each.variable for each in self._variables.values()]) is not None:
            for each in self._variables.values():
                # Of the values: what was common may be infinite. What nobody trains is not sent.
                if self._merge_of(each.variable) == "mean" and not each.is_frozen:
                    each.common.assign(tf.zeros_like(each.common))
            self._average(tf.zeros([len(NAMES)]), is_outer_step=False)
        self.begin()

    def state_dict(self) -> dict[str, dict[int, Any]]:
        """Returns the velocities of the outer SGD, equal on all ranks; see `HasSlots`."""
        velocities = self._velocities.values.items()
        return {"velocity": {key: flat.to_array(tf.convert_to_tensor(each)) for key, each in velocities}}

    def load_state_dict(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Loads what `state_dict` has returned; an empty mapping resets."""
        self._velocities.load(state.get("velocity", {}))

    def _average(self, votes: tf.Tensor, *, is_outer_step: bool = True) -> tf.Tensor:
        """Averages, unless a rank has loaded weights; returns the sum of the votes."""
        averaged = [each for each in self._variables.values() if self._merge_of(each.variable) is not None]
        weights = [each for each in averaged if each.is_weight]
        statistics = [each for each in averaged if not each.is_weight and not each.is_frozen]
        frozen = [each for each in averaged if each.is_frozen]
        contributions = [self._contribution(each) for each in frozen]
        is_written = tf.reduce_any(
            [False, *(tf.reduce_any(raw_variable(each.variable) != each.common) for each in frozen)]
        )
        sums, (*totals, counts, num_writers) = self._reducer.sum(
            [self._contribution(each) for each in weights],
            [*map(self._contribution, statistics), votes, tf.cast(is_written, votes.dtype)],
            variables=[each.variable for each in weights],
        )
        loads_weights = counts[NAMES.index("weights")] > 0
        for each, total in zip(weights, sums, strict=True):
            value = each.common + (self._outer_step(each, total, loads_weights) if is_outer_step else total)
            value = value if each.variable.constraint is None else each.variable.constraint(value)
            _set_common(each, value, loads_weights)
        for each, total in zip(statistics, totals, strict=True):
            _set_common(each, tf.cast(summable(each.common), total.dtype) + total, loads_weights)

        def merge_frozen() -> None:
            for each, total in zip(frozen, self._engine.allreduce(contributions), strict=True):
                _set_common(each, tf.cast(summable(each.common), total.dtype) + total, loads_weights)

        if frozen:
            tf.cond(num_writers > 0, merge_frozen, lambda: None)
        self._num_steps.assign(0)
        return counts

    def _outer_step(self, averaged: _AveragedVariable, total: tf.Tensor, loads_weights: tf.Tensor) -> tf.Tensor:
        """Returns the outer SGD's change of a weight for the ranks' mean change `total`."""
        if self._momentum:
            exact = tf.float32 if total.dtype.size < tf.float32.size else total.dtype
            velocity = self._velocities.get(averaged.variable, total.shape, exact)
            change = tf.cast(total, exact)
            velocity.assign(tf.where(loads_weights, velocity, self._momentum * velocity + change))
            total = tf.cast(change + self._momentum * velocity, total.dtype)
        return self._learning_rate * total

    def _contribution(self, averaged: _AveragedVariable) -> tf.Tensor:
        """Returns this rank's term to the ranks' mean change; exactly 0 for a variable that was not written."""
        change = summable(averaged.variable) - summable(averaged.common)
        merge = self._merge_of(averaged.variable)
        if merge == "sum":
            return change
        if merge == "first":
            return change if self._engine.rank == 0 else tf.zeros_like(change)
        return change / self._engine.size  # of integers a float

    def _merge_of(self, variable: Any) -> str | None:
        """Returns how a variable is merged, `None` for one that is no number of which a mean can be taken."""
        by_aggregation = {"sum": "sum", "only_first_replica": "first", "mean": "mean"}
        if (aggregation := aggregation_of(variable)) in by_aggregation:
            return by_aggregation[aggregation]
        if is_mergeable(variable):
            return "mean"
        _, merge = self._written.merges["train"].get(key_of(variable), (None, None))
        is_unknown = merge is None and runs_eagerly(self._model)  # another rank may have written it
        return "first" if merge == "count" or is_unknown else merge

    def _add_variables(self) -> None:
        written = set(self._written.merges["train"]) | statistics_of_keras(self._model)
        trained = {id(each) for each in self._model.trainable_variables}
        candidates = [*self._model.weights, *(variable for variable, _ in self._written.merges["train"].values())]
        for variable in {key_of(each): each for each in candidates}.values():
            if variable.dtype == "string" or is_of_one_rank(self._model, variable):
                continue
            # The scales of float8 layers are not trained by gradients.
            is_weight = id(variable) in trained and not getattr(variable, "overwrite_with_gradient", False)
            # In an eager step each rank knows what it has written itself.
            is_known = key_of(variable) in written and not runs_eagerly(self._model)
            is_frozen = id(variable) not in trained and not is_known
            if known := self._variables.get(id(variable)):
                common = known.common
            else:
                with tf.init_scope():
                    common = unlifted_variable(tf.convert_to_tensor(variable))
            self._variables[id(variable)] = _AveragedVariable(variable, common, is_weight, is_frozen)


def _set_common(averaged: _AveragedVariable, value: tf.Tensor, loads_weights: tf.Tensor) -> None:
    """Sets a variable to a new common value; if a rank has loaded weights, it stays what it is on each rank."""
    common, variable = averaged.common, raw_variable(averaged.variable)
    value = value if common.dtype.is_floating or common.dtype.is_complex or value.dtype.is_integer else tf.round(value)
    common.assign(tf.where(loads_weights, common, tf.cast(value, common.dtype)))
    variable.assign(tf.where(loads_weights, variable, common))


class LocalSGDStep(TrainStep):
    """A step on the mean of this rank's rows; the ranks average their weights after some of these steps.

    Metrics are weighted by the rank's share of the rows, as in other steps.
    """

    has_joint_metrics = False

    def __init__(self, extended: AllReduceExtended, shard: Shard, *, local_sgd: LocalSGD, **kwargs: Any) -> None:
        super().__init__(extended, shard, **kwargs)
        self._local_sgd = local_sgd
        self.weight = tf.cast(self.active, tf.float64)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[UpdatePipeline]:
        """Opens the step on a model; the ranks may average their weights at its end."""
        with self._extended.no_sync(), super().running(model) as pipeline:
            yield pipeline
        rates = [self._rate_of(innermost(optimizer)) for optimizer in optimizers_of(model)]
        with tf.control_dependencies(self.data_tensors):  # the end of the data is no step
            self._local_sgd.after_step(self._votes.vector(rates), lambda counts: self._votes.apply(counts, rates))

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns this rank's values, unreduced."""
        return list(values)

    def _merge(self, buffers: BufferSync) -> None:
        """Keeps this rank's statistics, unless it had no rows."""
        buffers.restore_unless(self.active)


class KeepLocal(Reduce):
    """Keeps this rank's gradients, for local SGD."""

    def _check_loss_scale(self) -> None:
        raise StrategyError(
            "sync_every does not support loss scaling. Received: a LossScaleOptimizer (mixed_float16) and sync_every. "
            "Expected gradients of one scale. Fix: use mixed_bfloat16, or remove sync_every."
        )

    def _sum(self, update: Update, places: Sequence[int]) -> list[Any]:
        return update.terms([update.gradients[place] for place in places])
