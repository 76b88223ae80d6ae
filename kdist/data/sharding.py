"""Who gets which sample: pure index arithmetic, without TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kdist.errors import DataError

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one input is sharded among the ranks.

    A step of the job takes a *group* of the user's consecutive batches: `micro_batches` of them; without that number,
    `num_shards` when the batch is scaled, and one otherwise. Groups restart at each epoch.

    Attributes:
        num_shards: int, the number of ranks that the input is sharded among.
        shard_id: int, this rank's number, from 0.
        scale_batch: bool, whether each rank takes a whole batch of the user's at a step. If `False`, each
            batch is split row-wise among the ranks.
        seed: int, at least 0 and equal on all ranks; every order is derived from it.
        steps_per_epoch: int or `None`, the number of the user's own batches in an epoch; `None` if an epoch
            is one pass over the data.
        micro_batches: int or `None`, the user's batches in a step, whatever the number of ranks.
    """

    num_shards: int = 1
    shard_id: int = 0
    scale_batch: bool = True
    seed: int = 0
    steps_per_epoch: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.shard_id < self.num_shards:
            raise DataError(
                f"`shard_id` is out of range. Received: shard_id={self.shard_id}, num_shards={self.num_shards}. "
                "Expected: 0 <= shard_id < num_shards. Fix: pass the rank and the size of the job."
            )
        if self.seed < 0:
            raise DataError(
                f"The seed is negative. Received: seed={self.seed}. Expected: 0 or more. Fix: pass such a seed."
            )
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise DataError(
                f"`steps_per_epoch` is not positive. Received: steps_per_epoch={self.steps_per_epoch}. Expected: 1 "
                "or more, or `None` for one pass over the data. Fix: pass the number of your batches in an epoch."
            )

    @property
    def group_size(self) -> int:
        """The number of the user's batches in a full step of the job."""
        return self.micro_batches or (self.num_shards if self.scale_batch else 1)

    @property
    def joins_batches(self) -> bool:
        """Whether a rank's rows of a step are those of several batches, or of a part of them."""
        return self.micro_batches not in (None, self.num_shards)

    @property
    def splits_rows(self) -> bool:
        """Whether a rank takes a near-equal slice of the rows of a step's batches, instead of one whole batch."""
        return self.joins_batches or not self.scale_batch

    def most_rows(self, batch_size: int) -> int:
        """Returns how many rows a rank takes at most in a step, of batches of `batch_size` rows."""
        return -(-self.group_size * batch_size // self.num_shards)

    @property
    def job_steps_per_epoch(self) -> int | None:
        """The steps that the job makes for `steps_per_epoch` of the user's batches."""
        return None if self.steps_per_epoch is None else -(-self.steps_per_epoch // self.group_size)

    @property
    def fills_groups(self) -> bool:
        """Whether groups follow each other without a gap, because no epoch ends within one."""
        return self.steps_per_epoch is None or self.steps_per_epoch % self.group_size == 0

    def own_batches_per_epoch(self, rank: int) -> int | None:
        """The batches that a rank takes in an epoch from a stream of its own; `None` if an epoch is one pass."""
        if self.steps_per_epoch is None or not self.scale_batch:
            return self.steps_per_epoch
        return len(range(rank, self.steps_per_epoch, self.num_shards))

    def unsharded(self) -> Plan:
        """Returns the plan for an input that is this rank's shard already."""
        steps = self.own_batches_per_epoch(self.shard_id) or None
        return dataclasses.replace(self, num_shards=1, shard_id=0, steps_per_epoch=steps, micro_batches=None)


def split_rows(num_rows: Any, num_shards: int, shard_id: Any) -> tuple[Any, Any]:
    """Returns the near-equal contiguous slice of a shard.

    The slices of all shards follow each other and cover all rows; their sizes differ by at most 1. The first shard has
    rows if there are any: its values are those that one process would have, where a variable has rank 0's.

    Args:
        num_rows: int, the number of rows to split, or an `int64` array or tensor of such numbers.
        num_shards: int, the number of slices.
        shard_id: int, which slice, from 0, or an `int64` scalar tensor.

    Returns:
        `(start, stop)`; equal when the slice is empty.

    Example:
    >>> [split_rows(7, 3, shard_id) for shard_id in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    return -(-num_rows * shard_id // num_shards), -(-num_rows * (shard_id + 1) // num_shards)


def group(step: int, plan: Plan) -> tuple[int, int]:
    """Returns the user's batches in a step of the job, not limited by the end of the data.

    Args:
        step: int, the step within a pass over the data, from 0.
        plan: `Plan`.

    Returns:
        `(first, count)`: the first batch of the group, counted from the beginning of the pass, and how many
        follow each other.

    Example:
    >>> plan = Plan(num_shards=2, steps_per_epoch=3)
    >>> [group(step, plan) for step in range(4)]
    [(0, 2), (2, 1), (3, 2), (5, 1)]
    """
    first, count = _groups(np.array(step), plan)
    return int(first), int(count)


def _groups(steps: Indices, plan: Plan) -> tuple[Indices, Indices]:
    """Returns what `group` does, of many steps."""
    size, batches = plan.group_size, plan.steps_per_epoch
    if plan.job_steps_per_epoch is None or batches is None:
        return steps * size, np.full_like(steps, size)
    epochs, steps = np.divmod(steps, plan.job_steps_per_epoch)
    return epochs * batches + steps * size, np.minimum(size, batches - steps * size)


def num_steps(num_batches: int, plan: Plan) -> int:
    """Returns the steps that the job makes in one pass over `num_batches` of the user's batches."""
    if plan.steps_per_epoch is None or plan.job_steps_per_epoch is None:
        return -(-num_batches // plan.group_size)
    epochs, rest = divmod(num_batches, plan.steps_per_epoch)
    return epochs * plan.job_steps_per_epoch + -(-rest // plan.group_size)


def batches_in_steps(num_batches: int | None, plan: Plan) -> tuple[int, float] | None:
    """Returns how many of the user's batches a step of an epoch takes, at most and on average; `None` if unknown.

    Args:
        num_batches: int or `None`, those of a pass over the data, if known.
        plan: `Plan`.

    Example:
    >>> [batches_in_steps(batches, Plan(num_shards=4)) for batches in (1, 5)]
    [(1, 1.0), (4, 2.5)]
    """
    batches = plan.steps_per_epoch or num_batches
    if not batches or plan.num_shards == plan.group_size == 1:  # each rank may have data of its own
        return None
    return min(plan.group_size, batches), batches / -(-batches // plan.group_size)


def num_steps_of_streams(num_batches: Sequence[int], plan: Plan) -> int:
    """Returns the steps of a pass in which each rank takes batches of a stream of its own.

    Args:
        num_batches: sequence of int, the batches in the stream of each rank.
        plan: `Plan`.

    Returns:
        The number of steps until none of the ranks has a batch for the next one.

    Example:
    >>> num_steps_of_streams([2, 3], Plan(num_shards=2))
    3
    """
    if plan.steps_per_epoch is None or plan.job_steps_per_epoch is None:
        return max(num_batches)
    shares = [plan.own_batches_per_epoch(rank) or 0 for rank in range(plan.num_shards)]
    num_epochs = max(-(-number // share) if share else 0 for number, share in zip(num_batches, shares, strict=True))
    epochs, places = np.divmod(np.arange(num_epochs * plan.job_steps_per_epoch + 1), plan.job_steps_per_epoch)
    has_batch = np.zeros(len(epochs), bool)
    for number, share in zip(num_batches, shares, strict=True):
        has_batch |= (places < share) & (epochs * share + places < number)
    return int(np.argmin(has_batch))


def batches_of_step(step: int, num_batches: int | None, plan: Plan) -> tuple[int, int]:
    """Returns which of the user's batches this rank loads at a step.

    Args:
        step: int, the step within a pass over the data, from 0.
        num_batches: int or `None`, the user's batches in a pass; `None` if they never end.
        plan: `Plan`.

    Returns:
        `(first, count)`: the first of them, counted from the beginning of the pass, and how many follow each other. A
        rank with none takes one row of `first` as padding.

    Example:
    >>> plans = [Plan(num_shards=3, shard_id=shard_id, micro_batches=4) for shard_id in range(3)]
    >>> [batches_of_step(0, 100, plan) for plan in plans]
    [(0, 2), (2, 1), (3, 1)]
    """
    first, count = group(step, plan)
    if num_batches is not None:
        count = min(count, num_batches - first)
    if not plan.scale_batch:
        return first, 1
    each, more = divmod(count, plan.num_shards)  # the first ranks have one more
    own = each + (plan.shard_id < more)
    return first + (each * plan.shard_id + min(plan.shard_id, more) if own else 0), own


def rows_of_steps(num_samples: int, batch_size: int, plan: Plan) -> tuple[Indices, Indices, Indices, Indices]:
    """Returns the rows that this rank takes at each step of one pass over arrays.

    The rows of a step's group are split into near-equal contiguous slices. Where there are fewer rows than
    ranks, a rank without any takes the step's first row as padding.

    Args:
        num_samples: int, the number of rows of the arrays.
        batch_size: int, the user's batch size.
        plan: `Plan`.

    Returns:
        `(starts, stops, rows, global_rows)`, each an `int64` array with one entry a step. Positions
        `starts[i]:stops[i]` in the epoch's order are taken at step `i`; `rows[i]` of them are not
        padding, and `global_rows[i]` of those of all ranks.

    Raises:
        DataError: if there is no sample, or the batch size is not positive.
    """
    if num_samples < 1:
        raise DataError(
            f"The arrays have no samples. Received: {num_samples} samples. Expected: at least one. "
            "Fix: pass arrays whose first dimension is not 0."
        )
    if batch_size < 1:
        raise DataError(
            f"`batch_size` is not positive. Received: batch_size={batch_size}. Expected 1 or more. Fix: pass 1 or more."
        )
    steps = num_steps(-(-num_samples // batch_size), plan)
    first, count = (batches * batch_size for batches in _groups(np.arange(steps), plan))
    total = np.minimum(first + count, num_samples) - first
    starts, stops = split_rows(total, plan.num_shards, plan.shard_id)
    rows = stops - starts
    starts = np.where(rows > 0, first + starts, first)
    return starts, starts + np.maximum(rows, 1), rows, total


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Returns the order of the samples in an epoch: a pure function, equal on all ranks."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def batchwise_order(num_samples: int, batch_size: int, plan: Plan, epoch: int) -> Indices:
    """Returns the order of an epoch in which samples are shuffled within their step only.

    Args:
        num_samples: int, the number of samples.
        batch_size: int, the user's batch size.
        plan: `Plan`.
        epoch: int, the epoch's number, from 0.

    Returns:
        An `int64` array of shape `(num_samples,)`, equal on all ranks.
    """
    total = rows_of_steps(num_samples, batch_size, plan)[3]
    step_of_sample = np.repeat(np.arange(len(total)), total)
    draws = np.random.default_rng([plan.seed, epoch]).random(num_samples)
    return np.lexsort((draws, step_of_sample))
