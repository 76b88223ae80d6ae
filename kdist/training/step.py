"""One training, test or predict step of one rank, traced or run eagerly: what makes it a share of the global step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.shard import Shard
from kdist.strategies.all_reduce import AllReduceExtended
from kdist.training import _keras_internals as internals
from kdist.training.losses import GlobalLoss
from kdist.training.metrics import flat_metrics, scalars_weighted


class Step:
    """A rank's part of a global step.

    The global loss is the sum over ranks of `weight` times the rank's loss, and so is its gradient; the weight is
    the rank's share of the global batch's rows. A rank without data runs one real row at weight 0.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`, this rank's rows and the counts. Empty `global_rows` are asked of the other ranks, and a
            step in which no rank has rows ends the pass over the data on all of them.

    Attributes:
        data: structure of tensors, what the user's step gets.
        rows: `int64` scalar, this rank's rows that count.
        share: `float64` scalar, this rank's share of the global rows.
        weight: `float64` scalar, how much this rank's loss counts: by its share, where ranks make a step together.
        active: `bool` scalar, whether this rank has rows that count.
        applying: bool, whether an optimizer works on reduced gradients.
        loss_is_weighted: bool, whether the backward pass starts from the loss times the weight, so that gradients are
            this rank's addends as they come.
    """

    def __init__(self, extended: AllReduceExtended, shard: Shard) -> None:
        self._extended = extended
        self._rank = extended.engine.rank
        self.rows = tf.reshape(shard.rows, ())
        self.active = self.rows > 0
        self.applying = False
        self.loss_is_weighted = False
        self.data = shard.data
        global_rows = shard.global_rows
        if isinstance(global_rows, tuple):
            (global_rows,) = extended.reduce_sum([self.rows])
            with tf.control_dependencies([_end_of_data_unless(global_rows > 0)]):
                # Nothing of the user's step may run before the check.
                self.data = keras.tree.map_structure(lambda x: None if x is None else tf.identity(x), shard.data)
        self.weight = self.share = tf.cast(self.rows, tf.float64) / tf.cast(tf.reshape(global_rows, ()), tf.float64)

    @property
    def is_chief(self) -> bool:
        """Whether this is the rank whose value is taken where one rank's is."""
        return self._extended.engine.rank == 0

    @property
    def arrived(self) -> list[tf.Tensor]:
        """The tensors of the data: what waits for them is not run at the end of data of unknown length."""
        return [leaf for leaf in tf.nest.flatten(self.data, expand_composites=True) if tf.is_tensor(leaf)]

    def notes(self) -> dict[str, Any]:
        """Returns what has been noted while the step was traced so far."""
        return {name: copy.copy(value) for name, value in vars(self).items() if isinstance(value, bool | list)}

    def restore(self, notes: dict[str, Any]) -> None:
        """Forgets what was noted since, to trace again."""
        vars(self).update(notes)

    def sum_over_ranks(self, value: tf.Tensor) -> tf.Tensor:
        """Sums the active ranks' values.

        Collective: every rank must call this, in the same order.
        """
        (total,) = self._extended.reduce_sum([tf.where(self.active, value, tf.zeros_like(value))])
        return total

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Averages tensors over the ranks, by their shares.

        Collective: every rank must call this, in the same order.
        """
        return self._extended.reduce_sum([self.weighted(value) for value in values])

    def weighted(self, value: tf.Tensor | tf.IndexedSlices) -> Any:
        """Multiplies a value by this rank's share; what an idle rank has counts nothing, NaN included."""
        weight = tf.cast(self.weight, value.dtype)
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                tf.math.multiply_no_nan(value.values, weight), value.indices, dense_shape=value.dense_shape
            )
        return tf.math.multiply_no_nan(value, weight)

    def per_share(self, value: tf.Tensor) -> tf.Tensor:
        """Divides what is a sum over this rank's rows, so that the ranks' weighted sum is the sum over all rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.weight, value.dtype))

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Opens the step on a model: losses, metrics and seeds follow the ranks' shares while it is open."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._extended.in_step(self))
            stack.enter_context(internals.replaced_losses(model, lambda loss: GlobalLoss(loss, self)))
            stack.enter_context(internals.activities_scaled(model, self.per_share))
            stack.enter_context(scalars_weighted(flat_metrics(model), lambda: self.share))
            stack.enter_context(folded_seeds(internals.seed_generators(model), self._rank))
            yield


@contextlib.contextmanager
def folded_seeds(generators: Sequence[keras.random.SeedGenerator], rank: int) -> Iterator[None]:
    """Gives each rank its own random draws from equal seed states: the rank is folded into what `next` returns.

    Args:
        generators: the seed generators that are meant.
        rank: int, this rank; rank 0 draws what one process would.
    """
    offset = rank * 0x9E3779B1 % (2**31 - 1)  # far apart for neighbouring ranks

    def folded(generator: keras.random.SeedGenerator) -> Callable[..., tf.Tensor]:
        def following(ordered: bool = True) -> tf.Tensor:
            seed = type(generator).next(generator, ordered=ordered)
            return seed + tf.constant([offset, 0], seed.dtype)

        return following

    for generator in generators:
        generator.__dict__["next"] = folded(generator)
    try:
        yield
    finally:
        for generator in generators:
            generator.__dict__.pop("next", None)


def _end_of_data_unless(goes_on: tf.Tensor) -> tf.Tensor:
    """Ends the pass over the data, as the end of a dataset does, unless a `bool` scalar holds."""

    def stop() -> Any:
        raise StopIteration

    if tf.executing_eagerly():
        return tf.constant(True) if goes_on else stop()
    # A function that raises StopIteration gives OutOfRangeError, which Keras takes for the end of the data.
    return tf.cond(
        goes_on, lambda: tf.constant(True), lambda: tf.ensure_shape(tf.numpy_function(stop, [], tf.bool), ())
    )
