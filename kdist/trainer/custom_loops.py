"""A training loop of the user's own without `strategy.run`: its gradients are averaged over the ranks."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.errors import StrategyError
from kdist.keras_hooks.custom_loops import APPLY, watch_optimizers, watch_scopes, whole_losses
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import innermost, set_optimizer_strategy, trained_variables
from kdist.keras_hooks.patching import original, patch
from kdist.reports.log import once
from kdist.restarts.events import own_reports
from kdist.sharding.optimizer import shard, sharded
from kdist.state.broadcast import broadcast_state
from kdist.state.comparison import check_agreement, first_difference
from kdist.step.reduce import agreed_gradients
from kdist.strategies.all_reduce import AllReduceStrategy

logger = logging.getLogger("kdist")

_SHARE_OUT = (
    "These two lines shard the rows: `dataset = dataset.batch(batch_size, drop_remainder=True)` and `dataset = "
    "tf.distribute.get_strategy().experimental_distribute_dataset(dataset)`"
)


# Options, with their defaults, that only steps of `fit` and `train_on_batch` have.
_OF_FIT = {"compression": None, "bucket_mb": None, "sparse_as_dense": False, "sync_every": 1}


class CustomLoops:
    """The updates of optimizers outside of a replica.

    Gradients are averaged over the ranks, in one message an update. Where all ranks saw the same rows that is one
    process's result; where each saw as many rows of its own, it is the global batch's.
    """

    def __init__(self, strategy: AllReduceStrategy) -> None:
        self._strategy = strategy
        self._extended = strategy.extended
        self._engine = strategy.engine
        self._begun: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()
        self._is_first_update: tf.Variable | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which a script may have its own loops: for the optimizers that it makes or uses there."""
        with (
            watch_optimizers(self.install, self._adopt, lambda: self._extended.is_in_replica),
            whole_losses(),
            watch_scopes(self._refuse_other),
        ):
            yield

    def install(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Sets the methods on the instance, for its life; those that the user has set there are called by them."""
        own = {name: vars(optimizer).get(name) for name in APPLY}

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            run = own["apply"] or original(optimizer, "apply")
            variables = list(trainable_variables or trained_variables(innermost(optimizer)))
            with self._averaged(optimizer, list(grads), variables) as (means, agreed):
                is_default = trainable_variables is None and len(agreed) == len(variables)
                return run(means, None if is_default else agreed)

        def apply_gradients(grads_and_vars: Any) -> Any:
            # Wrapped too, as a custom optimizer may clip here before it calls `apply`.
            run, pairs = own["apply_gradients"] or original(optimizer, "apply_gradients"), list(grads_and_vars)
            variables = [variable for _, variable in pairs]
            with self._averaged(optimizer, [gradient for gradient, _ in pairs], variables) as (means, agreed):
                return run(zip(means, agreed, strict=True))

        if (settings := self._strategy.settings) is not None:
            shard(optimizer, self._engine, settings.options)
        patch(optimizer, "apply", apply)
        patch(optimizer, "apply_gradients", apply_gradients)

    def _adopt(self, optimizer: keras.optimizers.Optimizer, method: str) -> None:
        set_optimizer_strategy(optimizer, self._strategy)
        self.install(optimizer)

    def _refuse_other(self, strategy: tf.distribute.Strategy) -> None:
        if strategy is not self._strategy and tf.distribute.get_strategy() is self._strategy:  # in this thread
            raise StrategyError(
                f"The scope of another strategy is opened inside of kdist.scope(). Received: {type(strategy).__name__}."
                "scope(). Expected kdist's strategy, which has the replicas of all processes. Fix: replace the line "
                "that makes it by `strategy = tf.distribute.get_strategy()`, inside of kdist.scope(); make optimizers "
                "there, too."
            )

    @contextlib.contextmanager
    def _averaged(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yields what to apply, gradients and variables: the ranks' means outside of a replica, else what was given."""
        option = 'shard="optimizer"' if sharded(optimizer) is not None else ""
        option = "shard_embeddings" if any(table_of(each) is not None for each in variables) else option
        if self._extended.step is None and option:
            raise StrategyError(
                f"{option} does not support a training loop of the script's own. Received: "
                f"{type(optimizer).__name__}.apply outside of a model's training step. Expected fit or train_on_batch, "
                "with a train_step of the model's own if need be. Fix: move the loop's body to train_step, or use "
                f"kdist.AllReduce() without {option}."
            )
        if self._extended.step is None:
            self._warn_of_unused_options()
        if self._extended.is_in_replica:
            if self._extended.step is None:
                own_reports.made_step()  # now, where it is traced: a graph's first step is soon
            yield gradients, variables
            return
        if optimizer not in self._begun:
            self._begin(optimizer, variables)
            self._begun.add(optimizer)
        variables, gradients = agreed_gradients(self._engine, optimizer, variables, gradients)
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not given:
            with self._extended.reduced_replica():
                yield gradients, variables
            return
        own = [_tensor(gradients[place]) for place in given]
        means = [_mean(total, self._engine.size) for total in self._extended.reduce_sum(own)]
        self._tell_once(own, means)
        by_place = dict(zip(given, means, strict=True))
        with self._extended.reduced_replica():
            yield [by_place.get(place) for place in range(len(gradients))], variables

    def _warn_of_unused_options(self) -> None:
        options = None if self._strategy.settings is None else self._strategy.settings.options
        unused = [
            f"{name}={getattr(options, name)!r}"
            for name, default in _OF_FIT.items()
            if getattr(options, name, default) != default
        ]
        if unused:
            once.warning(
                "options of the scope have no effect in a training loop of the script's own, which sends whole "
                f"gradients in each update. Received: {', '.join(unused)}. Expected fit or train_on_batch with these. "
                "Fix: move the loop's body to train_step, or leave them out."
            )

    def _begin(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Makes rank 0's weights and optimizer state those of all ranks.

        Collective: every rank must call this, in the same order.
        """
        with tf.init_scope():  # before the step, where it is traced
            # Those of a built optimizer first, in its order: an eager step may leave out others on each rank.
            every = [*trained_variables(innermost(optimizer)), *variables, *optimizer.variables]
            state = list({id(each): each for each in every}.values())
            shapes = {f"variable {place}": [list(v.shape), str(v.dtype)] for place, v in enumerate(state)}
            check_agreement(self._engine, f"the first update of {type(optimizer).__name__}", shapes)
            found = first_difference(self._engine, state)
            if found is None:
                return
            broadcast_state(self._engine, state)
        if self._engine.rank == 0:
            logger.warning(
                "rank(s) %s began the training loop with other weights or another optimizer state than rank %d: all "
                "ranks now have those of rank 0. The first gradients of an eager loop were computed from the others. "
                "Fix: make the model and the optimizer inside of kdist.scope(), and load them on all ranks",
                found.ranks, found.root,
            )  # fmt: skip

    def _tell_once(self, own: Sequence[Any], means: Sequence[Any]) -> None:
        """Logs on the chief, in its first update, what is done with the gradients, and whether all ranks' are equal."""
        if self._engine.rank > 0:
            return
        if self._is_first_update is None:
            with tf.init_scope():
                self._is_first_update = tf.Variable(True, trainable=False)
        is_untold = self._is_first_update

        def tell() -> tf.Tensor:
            equal = [_is_close(mean, mine) for mean, mine in zip(means, own, strict=True)]
            is_untold.assign(False)
            return tf.numpy_function(self._tell, [tf.reduce_all(equal)], tf.bool)

        tf.cond(is_untold, tell, lambda: tf.constant(False))

    def _tell(self, equal: Any) -> np.bool_:
        own_reports.made_step()
        size = self._engine.size
        if equal:
            logger.info(
                "a training loop without strategy.run: its gradients, averaged over the %d ranks in each update, were "
                "equal on all of them. Either every rank trains on the same rows, which gives one process's result, "
                "and no sooner, or the loop has averaged them before (hvd.DistributedGradientTape). %s",
                size, _SHARE_OUT,
            )  # fmt: skip
        else:
            logger.info(
                "a training loop without strategy.run: its gradients are averaged over the %d ranks in each update. "
                "They differ: each rank trains on rows of its own, and counts 1/%d, however many rows it has. A "
                "dataset that every rank shuffles for itself is seen %d times in an epoch. %s",
                size, size, size, _SHARE_OUT,
            )  # fmt: skip
        return np.bool_(True)


def _tensor(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    values, indices = tf.convert_to_tensor(gradient.values), tf.convert_to_tensor(gradient.indices)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)  # made by hand, it may hold tuples


def _mean(total: Any, size: int) -> Any:
    """Returns the mean of a gradient, given its sum over the ranks; of a sparse one, given the slices of all ranks.

    An optimizer that squares gradients takes each slice by itself. So where all ranks have the same slices, which is
    where they saw the same rows, the mean has these and not `size` times as many.
    """
    if not isinstance(total, tf.IndexedSlices):
        return tf.math.scalar_mul(1 / size, total)
    values, indices = total.values, total.indices
    count = tf.shape(indices)[0] // size

    def of_each(tensor: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tensor[: size * count], tf.concat([[size, count], tf.shape(tensor)[1:]], 0))

    def are_same() -> tf.Tensor:
        by_rank = of_each(indices)
        return tf.reduce_all(by_rank == by_rank[:1]) & _is_close(of_each(values), of_each(values)[:1])

    # All ranks answer the same: this depends only on what all of them have received.
    is_same = tf.cond(tf.equal(size * count, tf.shape(indices)[0]), are_same, lambda: tf.constant(False))
    return tf.IndexedSlices(
        tf.cond(is_same, lambda: tf.reduce_mean(of_each(values), 0), lambda: values / size),
        tf.cond(is_same, lambda: indices[:count], lambda: indices),
        total.dense_shape,
    )


def _is_close(mean: Any, own: Any) -> tf.Tensor:
    """Returns whether a mean over the ranks is this rank's own gradient to rounding: then it is every rank's."""
    # A sparse gradient's mean has the rows of all ranks.
    mean, own = (tf.reduce_sum(g.values, axis=0) if isinstance(g, tf.IndexedSlices) else g for g in (mean, own))
    tolerance = (1e-4 if own.dtype.size > 2 else 0.05) * tf.reduce_max(tf.abs(own))
    return tf.reduce_all(tf.abs(mean - own) <= tolerance)
