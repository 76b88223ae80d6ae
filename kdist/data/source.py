"""The interface of an input that is sharded among the ranks."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.data import sharding
from kdist.data.batch import batch_signature
from kdist.data.sharding import Plan
from kdist.errors import DataError


class Source(abc.ABC):
    """One rank's shard of an input.

    Every rank gets the same number of elements, one for each step of the job. A pass over `dataset()` is a pass over
    the user's data. With `plan.steps_per_epoch` a pass may hold several epochs, or the beginning of one; the iterator
    is then kept from epoch to epoch, as Keras does.

    Attributes:
        plan: `Plan`, how the input is sharded.
        has_uneven_shards: bool, whether the ranks' data may end at different steps. If so, a rank without data gets
            padding rows, and a pass ends when all ranks' rows are padding; `dataset()` ends there if `end_together` was
            told all lengths, else it never ends. If `False`, all ranks' datasets end at the same step.
        reshuffles_each_iteration: bool, whether the order of a pass depends on how many iterators were made before.
        is_skipped_by_reading: bool, whether a pass is resumed by reading it from its beginning.
        has_hooks: bool, whether the user's code is called when an epoch begins or ends, and may change the order.
        draws_in_background: bool, whether the user's Python code makes the data in a thread that runs ahead of
            training.
        has_workers: bool, whether Keras' workers load the batches: between two epochs none may be asked for.
        is_single_pass: bool, whether a second iterator of `dataset()` lacks the elements that the first one took.
        knows_global_rows: bool, whether `Shard.global_rows` is known in every step, so that it need not be summed over
            the ranks.
        num_own_batches: int or `None`, the batches of this rank's own stream, where shards are uneven and it is known.
        cardinality: int or `None`, the number of samples (arrays) or batches (other inputs) of the user's input, equal
            on all ranks; `None` if unknown or endless.
        batch_size: int or `None`, the rows of the user's batches if an argument of the user sets them; `None` if the
            input does.
    """

    plan: Plan
    has_uneven_shards = False
    reshuffles_each_iteration = False
    is_skipped_by_reading = False
    has_hooks = False
    draws_in_background = False
    has_workers = False
    is_single_pass = False
    knows_global_rows = True
    num_own_batches: int | None = None
    cardinality: int | None = None
    batch_size: int | None = None

    @property
    def num_steps(self) -> int | None:
        """The number of steps in a pass over the data, equal on all ranks; `None` if unknown or endless."""
        return None if self.cardinality is None else sharding.num_steps(self.cardinality, self.plan)

    @property
    def batches_in_steps(self) -> tuple[int, float] | None:
        """See `sharding.batches_in_steps`."""
        return sharding.batches_in_steps(self.cardinality and -(-self.cardinality // (self.batch_size or 1)), self.plan)

    @abc.abstractmethod
    def dataset(self) -> tf.data.Dataset:
        """Returns the `tf.data.Dataset` of this rank's `Shard` elements."""

    @property
    def signature(self) -> Any:
        """Structure of `tf.TensorSpec` and the like of `Shard.data`, with an unknown batch dimension."""
        return batch_signature(self.dataset().element_spec.data)

    def fingerprint(self) -> list[str]:
        """Returns a summary of some of the input, by which ranks compare whether they have the same input."""
        return []

    def functions_fingerprint(self) -> list[str]:
        """Returns a summary of the lookup tables, variables and tensors that the user's functions use."""
        return []

    def targets_fingerprint(self) -> list[str]:
        """Returns a summary of the targets of the user's first batch, where that batch was loaded anyway."""
        return []

    def example(self) -> Any:
        """Returns a batch of the user's without taking it from an epoch, unless the source `is_single_pass`.

        Needed only to build a model's weights when `signature` has unknown dimensions besides the batch's.

        Raises:
            DataError: if there is none.
        """
        for shard in self.dataset().take(1):
            return shard.data
        raise empty_input_error("dataset")

    def end_together(self, num_own_batches: Sequence[int | None]) -> None:  # noqa: B027  other shards do
        """Makes the dataset end where all ranks' streams have ended, if the length of each is known.

        Args:
            num_own_batches: sequence of int or `None`, those of all ranks.
        """

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:  # noqa: B027  most have no epochs
        """Resumes an interrupted training: the next pass over `dataset()` is that of the given position.

        Args:
            epoch: int, how many epochs began before the one that comes next; -1 if none.
            pass_epoch: int, the number of the epoch in which the interrupted pass over the data began; `None` if
                none was interrupted.
            pass_step: int, the steps of that pass which were made: they will be skipped, and need not be loaded.
        """

    def repeat_hook(self, name: str) -> None:  # noqa: B027
        """Calls the user's `on_epoch_begin` or `on_epoch_end` once more, as it was called before an interruption.

        Args:
            name: str, which of them.
        """

    def holding_loaders(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which no code of the user's loads batches in the background."""
        return contextlib.nullcontext()

    def on_epoch_begin(self) -> None:  # noqa: B027  most inputs have nothing to do
        """Is called before the first element of an epoch is drawn."""

    def on_epoch_end(self) -> None:  # noqa: B027
        """Is called after the last element of an epoch was drawn."""


def empty_input_error(kind: str) -> DataError:
    """Returns the error for an input of a kind that yields nothing."""
    return DataError(
        f"The {kind} has no samples. Received: a {kind} that yields no batch. Expected: at least one batch. "
        f"Fix: check what the {kind} reads."
    )
