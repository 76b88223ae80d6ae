"""The gradient reducer: sums gradients over the ranks, in buckets and with compression."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.arrays.buckets import assign_buckets
from kdist.engines.engine import Engine
from kdist.gradients.compression import CompressedSums, Compression, Gradients, full_bytes, is_finite, planned_bytes
from kdist.gradients.half_precision import HalfPrecision
from kdist.gradients.power_sgd import PowerSGD
from kdist.gradients.top_k import TopK

logger = logging.getLogger("kdist")


def make_compression(name: str | None, *, powersgd_rank: int, topk_ratio: float) -> Compression | None:
    """Returns the compression that `kdist.AllReduce` has by a name."""
    made: dict[str | None, Callable[[], Compression]] = {
        "fp16": lambda: HalfPrecision(tf.float16),
        "bf16": lambda: HalfPrecision(tf.bfloat16),
        "powersgd": lambda: PowerSGD(powersgd_rank),
        "topk": lambda: TopK(topk_ratio),
    }
    return None if name is None else made[name]()


class GradientReducer:
    """Sums one model's gradients over the ranks.

    Without options all gradients are one message, exact to rounding. With `bucket_mb` they are several messages, last
    layers first, each sent as soon as its gradients are computed. With `compression` they are sent in fewer bytes.

    Args:
        engine: `Engine`.
        compression: `Compression` or `None`.
        bucket_mb: float or `None`, the size from which a message is sent.
        sparse_as_dense: bool, whether `tf.IndexedSlices` are converted to dense tensors.

    Attributes:
        keeps_residuals: bool, whether the compression uses error feedback.
        sends_once: bool, whether all gradients are one message.
        is_compressed: bool, whether gradients are sent compressed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        compression: Compression | None = None,
        bucket_mb: float | None = None,
        sparse_as_dense: bool = False,
    ) -> None:
        self._engine = engine
        self._sparse_as_dense = sparse_as_dense
        self._compression = compression
        self._bucket_mb = bucket_mb
        self.sends_once = bucket_mb is None
        self.is_compressed = compression is not None
        self._logged: set[tuple[int, ...]] = set()
        self.keeps_residuals = compression is not None and compression.keeps_residuals

    def state_dict(self) -> dict[str, dict[int, Any]]:
        """Returns the slots of the compression; see `Compression.state_dict`.

        Collective: every rank must call this, in the same order.
        """
        return {} if self._compression is None else self._compression.state_dict(self._engine)

    def load_state_dict(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Loads what `state_dict` has returned, on any number of ranks; an empty mapping resets."""
        if self._compression is not None:
            self._compression.load_state_dict(self._engine, state)

    def sum(
        self,
        gradients: Gradients,
        exact: Gradients,
        *,
        variables: Sequence[Any],
        terms: Callable[[Gradients], list[Any]] = list,
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients, and tensors that must stay exact, over the ranks.

        Collective: every rank must call this, in the same order.

        Args:
            gradients: sequence of floating tensors and `tf.IndexedSlices`, first layers first.
            exact: sequence of tensors, which are sent uncompressed in the last message.
            variables: sequence of variables, one for each gradient.
            terms: callable that returns this rank's terms for the gradients of a message.

        Returns:
            A pair of lists: the sums of `gradients` and of `exact`.
        """
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        self._log_compression(gradients, variables)
        plan = assign_buckets([planned_bytes(each) for each in gradients], self._bucket_mb)
        sums: list[Any] = list(gradients)
        rest: list[Any] = []
        changes: list[tuple[tf.Variable, tf.Tensor]] = []
        for bucket in plan:
            others = exact if bucket is plan[-1] else ()
            group = terms([gradients[index] for index in bucket])
            received, rest, changed = self._sum_message(group, others, [variables[index] for index in bucket])
            changes += changed
            for index, total in zip(bucket, received, strict=True):
                sums[index] = total
        if changes:
            are_finite = tf.reduce_all(tf.stack([is_finite(each) for each in sums]))
            for variable, value in changes:
                variable.assign(tf.where(are_finite, value, variable))
        return sums, rest

    def _sum_message(self, group: Gradients, others: Gradients, variables: Sequence[Any]) -> CompressedSums:
        if self._compression is not None:
            return self._compression.sum(self._engine, group, others, variables)
        totals = self._engine.allreduce([*group, *others])
        return CompressedSums(totals[: len(group)], totals[len(group) :], [])

    def _log_compression(self, gradients: Gradients, variables: Sequence[Any]) -> None:
        """Logs once for each set of variables what is sent; each of several optimizers has its own."""
        which = tuple(map(id, variables))
        if self._compression is None or which in self._logged or self._engine.rank > 0:
            return
        self._logged.add(which)
        logger.info(
            "compression: %s bytes of gradients travel in an update, not %s, as %s: results are near those without it, "
            "not equal",
            f"{sum(map(self._compression.num_bytes, gradients)):,}",
            f"{sum(map(full_bytes, gradients)):,}",
            self._compression.description,
        )
