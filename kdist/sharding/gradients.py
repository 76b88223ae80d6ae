"""Gradients of which each rank gets its part of the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.arrays.buckets import PARTS_MB, assign_buckets
from kdist.engines.engine import Engine
from kdist.gradients.compression import planned_bytes
from kdist.sharding.backward import PacedBackward
from kdist.sharding.part import Part

SMALL_BYTES = 1 << 20
"""Below this size of the gradients of a message, sums of whole gradients cost less than another message."""

_HALVES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class PartReducer:
    """Sums gradients over the ranks, and gives each rank its parts.

    Args:
        engine: `Engine`.
        compression: `None`, `"fp16"` or `"bf16"`.
        bucket_mb: float or `None`, the size from which a message is sent.
        sparse_as_dense: bool, whether `tf.IndexedSlices` are converted to dense tensors.
    """

    def __init__(
        self, engine: Engine, *, compression: str | None, bucket_mb: float | None, sparse_as_dense: bool
    ) -> None:
        self._engine = engine
        self._half = _HALVES.get(compression or "")
        self._bucket_mb = bucket_mb or PARTS_MB
        self._sparse_as_dense = sparse_as_dense

    def sum(
        self,
        gradients: Sequence[Any],
        parts: Sequence[Part],
        terms: Callable[[Sequence[Any]], list[Any]],
        exact: Sequence[tf.Tensor],
        have_equal_indices: Callable[[Any], bool],
    ) -> tuple[list[Any], list[Any]]:
        """Returns this rank's part of each gradient's sum over the ranks, and the whole sums of other tensors.

        Collective: every rank must call this, in the same order.

        Args:
            gradients: sequence of tensors and `tf.IndexedSlices`, first layers first.
            parts: sequence of `Part`, one for each gradient.
            terms: callable that returns this rank's terms for the gradients of a message.
            exact: sequence of tensors, which travel with the gradients and keep their dtypes.
            have_equal_indices: callable that takes a gradient, and returns whether it is slices of equal indices on all
                ranks, whose values are added up.
        """
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        sums = list(gradients)
        waiting = list(exact)
        buckets = assign_buckets([planned_bytes(each) for each in gradients], self._bucket_mb)
        backward = PacedBackward(gradients, buckets)
        for message, bucket in enumerate(buckets):
            sent = [self._rounded(each) for each in terms([gradients[place] for place in bucket])]
            are_equal = list(map(have_equal_indices, sent))
            received, others = self._message(sent, [parts[place] for place in bucket], waiting, are_equal)
            exact, waiting = others or exact, []
            backward.sent(message, received)
            for place, total in zip(bucket, received, strict=True):
                sums[place] = tf.cast(total, gradients[place].dtype)
        return sums, self._engine.allreduce(waiting) if waiting else list(exact)

    def _message(
        self, sent: Sequence[Any], parts: Sequence[Part], exact: Sequence[tf.Tensor], are_equal: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        pays = sum(planned_bytes(each) for each in sent) >= SMALL_BYTES
        is_cut = [
            pays and part.is_cut and not isinstance(each, tf.IndexedSlices)
            for each, part in zip(sent, parts, strict=True)
        ]
        cut = [tf.reshape(each, part.view) for each, part, is_it in zip(sent, parts, is_cut, strict=True) if is_it]
        whole = [
            each.values if is_equal else each
            for each, is_it, is_equal in zip(sent, is_cut, are_equal, strict=True)
            if not is_it
        ]
        rows = iter(self._engine.reduce_scatter(cut) if cut else [])
        totals = iter(self._engine.allreduce([*whole, *exact]) if whole or exact else [])
        mine = []
        for each, part, is_it, is_equal in zip(sent, parts, is_cut, are_equal, strict=True):
            total = next(rows) if is_it else next(totals)
            total = tf.IndexedSlices(total, each.indices, each.dense_shape) if is_equal else total
            mine.append(total if is_it else _part_of(total, part))
        return mine, list(totals)

    def _rounded(self, gradient: Any) -> Any:
        return gradient if self._half is None or not gradient.dtype.is_floating else tf.cast(gradient, self._half)


def _part_of(total: Any, part: Part) -> Any:
    return part.of_slices(total) if isinstance(total, tf.IndexedSlices) else part.of(total)
