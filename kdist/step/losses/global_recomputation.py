"""Tensors that a step computes from its rank's rows, computed again from those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.state.graphs.inlined import Inlined
from kdist.state.graphs.recomputed import Recomputed, RowReduction
from kdist.state.rows.frontier import Frontier
from kdist.strategies.open_step import OpenStep

RECOMPUTATION_ERRORS = (LookupError, TypeError, ValueError, tf.errors.OpError)
"""Raised where something cannot be computed again, as what has no gradient."""

_WIDE = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8), tf.float64),
}


class GlobalRecomputation:
    """What a step would have computed if its rank had had the rows of all ranks.

    Each sum and mean over rows is that of all ranks, as by `kdist.all_reduce`, and rows are those of all, as by
    `kdist.all_gather`. The rest is computed again from them, on each rank.

    Collective: every rank must call this, in the same order.

    Args:
        step: the open step.
        frontier: `Frontier` of the tensors.
        inlined: `Inlined`, by which the tensors of `frontier` were made of the step's.
        gather: callable that takes rows of this rank and returns those of all; not needed for means and sums.

    Attributes:
        taken: list of pairs, tensors of this rank that are taken as they are, and by what to differentiate them.
    """

    def __init__(
        self,
        step: OpenStep,
        frontier: Frontier,
        inlined: Inlined,
        gather: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
    ) -> None:
        self._step = step
        self._recomputed = recomputed = Recomputed(frontier.is_changed, inlined.original)
        rows = [each.tensor for each in frontier.listed if each.kind == "rows"]
        own = [recomputed.take(each) for each in rows]
        recomputed.values |= dict(zip([each.name for each in rows], gather(own) if rows else (), strict=True))
        self.taken = recomputed.taken
        pending: list[RowReduction] = []
        for each in frontier.listed:
            if frontier.is_changed(each.tensor):
                self._send(pending, same_on_all=False)
            if each.kind != "rows":
                pending.append(each)
        self._send(pending, same_on_all=True)

    def __call__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor, of which `frontier` was found, would have been."""
        return self._recomputed(tensor)

    def _send(self, pending: list[RowReduction], *, same_on_all: bool) -> None:
        """Adds up means, sums and numbers of rows over the ranks, in one message.

        Collective: every rank must call this, in the same order.
        """
        parts: list[tf.Tensor] = []
        for each in pending:
            own = self._recomputed(each.tensor)
            own = own[:1] if each.kind == "shape" else own  # the number of rows
            wide = tf.cast(own, _WIDE.get(own.dtype, own.dtype))
            if each.count is not None:
                count = tf.cast(each.count, wide.dtype)
                parts += [tf.math.multiply_no_nan(wide, count), count]
            else:
                parts.append(self._step.weighted(wide) if each.kind == "mean" else wide)
        totals = iter(self._totals(parts, same_on_all=same_on_all) if parts else ())
        for each in pending:
            total = next(totals)
            total = total / next(totals) if each.count is not None else total
            total = tf.round(total) if each.tensor.dtype.is_integer else total
            total = tf.cast(total, each.tensor.dtype)
            rest = each.tensor[1:] if each.kind == "shape" else None
            self._recomputed.values[each.tensor.name] = total if rest is None else tf.concat([total, rest], 0)
        pending.clear()

    def _totals(self, parts: Sequence[tf.Tensor], *, same_on_all: bool) -> list[tf.Tensor]:
        """Returns sums over the ranks; a gradient is that of the weighted sum of the ranks' numbers, by the weight.

        Collective: every rank must call this, in the same order; the backward pass, too, unless all ranks compute the
        same from the sums.
        """
        step = self._step

        def add(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                if not same_on_all:
                    upstream = tuple(step.engine.allreduce([step.weighted(each) for each in upstream]))
                return [tf.math.divide_no_nan(each, tf.cast(step.weight, each.dtype)) for each in upstream]

            of_active = [tf.where(step.active, each, tf.zeros_like(each)) for each in values]
            return step.engine.allreduce(of_active), gradient

        return list(tf.custom_gradient(add)(*parts))
