"""How gradients travel between ranks: in which order, in how many messages, in how many bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.compression import Compression, Gradients, full_bytes
from kdist.gradients.halves import Halves
from kdist.gradients.power_sgd import PowerSGD
from kdist.gradients.top_k import TopK

logger = logging.getLogger("kdist")


def compression_named(name: str | None, *, powersgd_rank: int, topk_ratio: float) -> Compression | None:
    """Returns what a user calls by a name: see `kdist.AllReduce`."""
    made: dict[str | None, Callable[[], Compression]] = {
        "fp16": lambda: Halves(tf.float16),
        "bf16": lambda: Halves(tf.bfloat16),
        "powersgd": lambda: PowerSGD(powersgd_rank),
        "topk": lambda: TopK(topk_ratio),
    }
    return None if name is None else made[name]()


class Wire:
    """Sums one model's gradients over the ranks.

    Without options all gradients are one message, exact to rounding. With `bucket_mb` they are several, the last
    layers' first, each sent as soon as it is there, while the backward pass goes on to the layers before. With
    `compression` they travel in fewer bytes.

    Args:
        engine: `Engine`.
        compression: `Compression` or `None`.
        bucket_mb: float or `None`, megabytes from which on a message is sent.
        sparse_as_dense: bool, whether `tf.IndexedSlices` are summed as the tensors that they stand for.

    Attributes:
        keeps_residuals: bool, whether what a message leaves out is added to the next one.
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
        self._told: set[tuple[int, ...]] = set()
        self.keeps_residuals = compression is not None and compression.keeps_residuals

    def take(self) -> dict[str, dict[int, Any]]:
        """Returns what is kept from step to step; see `Compression.take`.

        Collective: every rank must call this, in the same order.
        """
        return {} if self._compression is None else self._compression.take(self._engine)

    def give(self, taken: Mapping[str, Mapping[int, Any]]) -> None:
        """Gives back what `take` has returned, to as many ranks or to others; an empty mapping makes it forget."""
        if self._compression is not None:
            self._compression.give(self._engine, taken)

    def sum(
        self,
        gradients: Gradients,
        exact: Gradients,
        *,
        variables: Sequence[Any],
        prepare: Callable[[Gradients], list[Any]] = list,
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients, and what must stay exact, over the ranks.

        Collective: every rank must call this, in the same order.

        Args:
            gradients: sequence of floating tensors and `tf.IndexedSlices`, first layers first.
            exact: sequence of tensors; they travel with the last message as they are.
            variables: sequence of variables, one for each gradient.
            prepare: callable that makes of each message's gradients what this rank adds.

        Returns:
            A pair of lists: the sums of `gradients` and of `exact`.
        """
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        self._tell(gradients, variables)
        plan = buckets([full_bytes(each) for each in gradients], self._bucket_mb)
        sums: list[Any] = list(gradients)
        rest: list[Any] = []
        for bucket in plan:
            others = exact if bucket is plan[-1] else ()
            group = prepare([gradients[index] for index in bucket])
            received, rest = self._sum_message(group, others, [variables[index] for index in bucket])
            for index, total in zip(bucket, received, strict=True):
                sums[index] = total
        return sums, rest

    def _sum_message(
        self, group: Gradients, others: Gradients, variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        if self._compression is not None:
            return self._compression.sum(self._engine, group, others, variables)
        totals = self._engine.allreduce([*group, *others])
        return totals[: len(group)], totals[len(group) :]

    def _tell(self, gradients: Gradients, variables: Sequence[Any]) -> None:
        """Says once what is lost, and what that saves; each of several optimizers has gradients of its own."""
        which = tuple(map(id, variables))
        if self._compression is None or which in self._told or self._engine.rank > 0:
            return
        self._told.add(which)
        logger.info(
            "compression: %s bytes of gradients travel in an update, not %s, as %s: results are near those without it, "
            "not equal",
            f"{sum(map(self._compression.num_bytes, gradients)):,}",
            f"{sum(map(full_bytes, gradients)):,}",
            self._compression.loss,
        )


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
