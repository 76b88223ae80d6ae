"""How gradients travel between ranks: in which order, in how many messages, in how many bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine

logger = logging.getLogger("kdist")

HALVES = {"fp16": tf.float16, "bf16": tf.bfloat16}

_Gradients = Sequence[tf.Tensor | tf.IndexedSlices]


class Wire:
    """Sums one model's gradients over the ranks.

    Without options all gradients are one message, exact to rounding. With `bucket_mb` they are several, the last
    layers' first, each sent as soon as it is there, while the backward pass goes on to the layers before. With
    `compression` they travel as 16-bit numbers: each rank adds up its part of the gradients in `float32`, from what
    the others have sent it, and sends the rounded sum to all. A number is rounded twice, however many ranks there are,
    and all ranks have the same one.

    Args:
        engine: `Engine`.
        compression: `None`, `"fp16"` or `"bf16"`.
        bucket_mb: float or `None`, megabytes from which on a message is sent.
    """

    def __init__(self, engine: Engine, *, compression: str | None = None, bucket_mb: float | None = None) -> None:
        self._engine = engine
        self._compression = compression
        self._bucket_mb = bucket_mb
        self._has_told = False

    def sum(
        self, gradients: _Gradients, exact: _Gradients, prepare: Callable[[_Gradients], list[Any]] = list
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients, and what must stay exact, over the ranks.

        Collective: every rank must call this, in the same order.

        Args:
            gradients: sequence of floating tensors and `tf.IndexedSlices`, first layers first.
            exact: sequence of tensors; they travel with the last message as they are.
            prepare: callable that makes of each message's gradients what this rank adds.

        Returns:
            A pair of lists: the sums of `gradients` and of `exact`.
        """
        self._tell(gradients)
        plan = buckets([_num_bytes(each) for each in gradients], self._bucket_mb)
        sums: list[Any] = list(gradients)
        rest: list[Any] = []
        for bucket in plan:
            others = exact if bucket is plan[-1] else ()
            group = prepare([gradients[index] for index in bucket])
            received, rest = self._sum_message(group, others)
            for index, total in zip(bucket, received, strict=True):
                sums[index] = total
        return sums, rest

    def _sum_message(self, group: _Gradients, others: _Gradients) -> tuple[list[Any], list[Any]]:
        if self._compression is None:
            totals = self._engine.allreduce([*group, *others])
            return totals[: len(group)], totals[len(group) :]
        half = HALVES[self._compression]
        dense = [each for each in group if _is_compressed(each)]
        # Slices are gathered, not summed: they can be rounded as they are.
        sparse = [_cast(each, half) for each in group if not _is_compressed(each)]
        received = self._engine.allreduce([*sparse, *others])
        slices, summed = iter(received[: len(sparse)]), iter(sum_halves(self._engine, dense, half))
        totals = [next(summed) if _is_compressed(each) else _cast(next(slices), each.dtype) for each in group]
        return totals, received[len(sparse) :]

    def _tell(self, gradients: _Gradients) -> None:
        """Says once that the gradients are rounded, and what that saves."""
        if self._compression is None or self._has_told or self._engine.rank > 0:
            return
        self._has_told = True
        full = sum(_num_bytes(each) for each in gradients)
        half = sum(_num_bytes(each) * 2 // each.dtype.size for each in gradients)
        logger.info(
            "compression=%r: %s bytes of gradients travel in a step, not %s, rounded to %s: results are near those "
            "without it, not equal",
            self._compression, f"{half:,}", f"{full:,}", HALVES[self._compression].name,
        )  # fmt: skip


def sum_halves(engine: Engine, tensors: Sequence[tf.Tensor], half: tf.DType) -> list[tf.Tensor]:
    """Sums tensors over the ranks; they travel as 16-bit numbers and are summed in `float32`.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`.
        tensors: sequence of floating tensors of known shapes.
        half: `tf.float16` or `tf.bfloat16`.
    """
    if not tensors:
        return []
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    rows = [tf.reshape(tf.cast(tensor, half), [-1]) for tensor in tensors]
    filling = -sum(sizes) % engine.size
    mine = tf.reshape(tf.concat([*rows, tf.zeros([filling], half)], 0), [engine.size, -1])
    (parts,) = engine.alltoall([mine])
    part = tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), half)
    (total,) = engine.allgather([part])
    totals = tf.split(tf.ensure_shape(total, [sum(sizes) + filling]), [*sizes, filling])[:-1]
    return [
        tf.cast(tf.reshape(total, tensor.shape), tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)
    ]


def buckets(sizes: Sequence[int], bucket_mb: float | None) -> list[list[int]]:
    """Returns which gradients share a message: from the last to the first, each message as full as it must be.

    Args:
        sizes: sequence of ints, the gradients' bytes, in the order of the layers.
        bucket_mb: float or `None`, megabytes from which on a message is sent; `None` for one message.

    Example:
    >>> buckets([8, 1_000_000, 1_000_000, 40], bucket_mb=1.0)
    [[3, 2], [1], [0]]
    """
    if bucket_mb is None:
        return [list(range(len(sizes)))]
    plan: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled >= bucket_mb * 1e6:
            plan.append([])
            filled = 0
        plan[-1].append(index)
        filled += sizes[index]
    return plan


def _is_compressed(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    return not isinstance(gradient, tf.IndexedSlices) and gradient.shape.is_fully_defined()


def _cast(gradient: tf.Tensor | tf.IndexedSlices, dtype: tf.DType) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def _num_bytes(gradient: tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the bytes that are known before the graph runs."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return (values.shape.num_elements() or 0) * values.dtype.size
