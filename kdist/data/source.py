"""The interface of an input that is shared out among the ranks."""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf

from kdist.data.sharding import Plan
from kdist.errors import DataError


class Source(abc.ABC):
    """One rank's part of an input.

    Every rank gets the same number of elements, one for each step of the job. A pass over `dataset()` is a
    pass over the user's data. With `plan.steps_per_epoch` a pass may hold several epochs, or an epoch's
    beginning; the iterator is then kept from epoch to epoch, as Keras does.

    Attributes:
        plan: `Plan`, how the input is shared out.
        ends_by_agreement: bool, whether the ranks' data may end at different steps. If so, `dataset()` never
            ends: a rank without data carries rows that do not count, and an epoch without `steps_per_epoch` is
            over when no rank has a row that counts. If `False`, all ranks' datasets end at the same step.
        follows_iterators: bool, whether the order of a pass depends on how many iterators were made before.
        has_hooks: bool, whether the user's code is called when an epoch begins or ends, and may change the order.
        draws_in_background: bool, whether Python code of the user's makes the data, in a thread of its own that
            runs ahead of training.
        reads_once: bool, whether what was drawn from an iterator of `dataset()` is lost to the next one.
    """

    plan: Plan
    ends_by_agreement = False
    follows_iterators = False
    has_hooks = False
    draws_in_background = False
    reads_once = False

    @property
    def knows_global_rows(self) -> bool:
        """Whether `Shard.global_rows` is known in every step, so that it need not be summed over the ranks."""
        return not self.ends_by_agreement

    @property
    def extent(self) -> int | None:
        """How many samples (arrays) or batches (all else) the user's input has, where known; equal on all ranks."""
        return None

    def glimpse(self) -> list[str]:
        """Returns what a part of the input looks like, by which ranks can tell whether they were given the same."""
        return []

    def seen_targets(self) -> list[str]:
        """Returns what the targets of the user's first batch look like, where it was loaded anyway."""
        return []

    @property
    def batch_size(self) -> int | None:
        """The rows of the user's batches where the user's argument says so; `None` where the input does."""
        return None

    @abc.abstractmethod
    def dataset(self) -> tf.data.Dataset:
        """Returns the `tf.data.Dataset` of this rank's `Shard` elements."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """The number of steps in a pass over the data, equal on all ranks; `None` if unknown or endless."""

    @property
    @abc.abstractmethod
    def signature(self) -> Any:
        """Structure of `tf.TensorSpec` and its kin of `Shard.data`, with an unknown batch dimension."""

    def example(self) -> Any:
        """Returns a batch of the user's, without losing it from an epoch.

        Needed only to build a model's weights when `signature` has unknown dimensions besides the batch's. What can
        be read only once loses it all the same.

        Raises:
            DataError: if there is none.
        """
        for shard in self.dataset().take(1):
            return shard.data
        raise no_samples("dataset")

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:  # noqa: B027  most follow no count of epochs
        """Takes up an interrupted training: the next pass over `dataset()` is that of the place given.

        Args:
            epoch: int, how many epochs began before the one that comes next; -1 if none.
            pass_epoch: int, the number of the epoch in which the interrupted pass over the data began; `None` if
                none was interrupted.
            pass_step: int, the steps of that pass which were made: they will be passed over, and need not be loaded.
        """

    def repeat_hook(self, name: str) -> None:  # noqa: B027
        """Calls the user's own `on_epoch_begin` or `on_epoch_end` once more, as it was called before an interruption.

        Args:
            name: str, which of them.
        """

    def on_epoch_begin(self) -> None:  # noqa: B027  most inputs have nothing to do
        """Is called before the first element of an epoch is drawn."""

    def on_epoch_end(self) -> None:  # noqa: B027
        """Is called after the last element of an epoch was drawn."""


def no_samples(kind: str) -> DataError:
    """Returns the error for an input of this kind that holds nothing."""
    return DataError(
        f"A {kind} without any sample. Received: a {kind} that yields no batch. Expected: at least one. "
        f"Fix: check what the {kind} reads."
    )
