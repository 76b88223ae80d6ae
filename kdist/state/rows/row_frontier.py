"""The rows of which a graph computes what relates them, which can be computed again from those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.recomputed import RowReduction, check_repeatable
from kdist.state.rows.row_wise import RowWise

_MAX_ROWS, _MAX_CHANGED = 16, 2000  # as where a gradient is what relates rows


class RowFrontier:
    """The last tensors of a graph that hold rows which are each computed from one, on all ways to some tensors.

    What comes after them can be computed again from the rows of all ranks, whatever it is.

    Args:
        values: symbolic tensors.
        rows: `RowWise` of the data.
        fixed: sequence of tensors that do not count as computed from rows.
        means: sequence of tensors that count as means over rows.

    Attributes:
        value: the first tensor.
        listed: list of `RowReduction`, what they are computed of.

    Raises:
        LookupError: if something that they are computed by cannot be computed again.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        rows: RowWise,
        fixed: Sequence[tf.Tensor],
        means: Sequence[tf.Tensor],
    ) -> None:
        self.value = values[0]
        self.listed: list[RowReduction] = []
        self._changed: set[str] = set()
        known = {tensor_key(each) for each in means}
        *_, free = (rows.follow(each, fixed, means) for each in values)
        pending, seen = list(values), set()
        while pending:
            tensor = pending.pop()
            if tensor.name in seen or free(tensor) or rows.is_of_data_without_rows(tensor):
                continue
            seen.add(tensor.name)
            if tensor_key(tensor) in known:
                self.listed.append(RowReduction(tensor, "mean"))
            elif rows(tensor):
                self.listed.append(RowReduction(tensor, "rows"))
            elif rows.is_shape(tensor):
                self.listed.append(RowReduction(tensor, "shape"))
            else:
                check_repeatable(tensor.op)
                self._changed |= {each.name for each in tensor.op.outputs}
                pending += tensor.op.inputs
        num_rows = sum(each.kind == "rows" for each in self.listed)
        if not 0 < num_rows <= _MAX_ROWS or len(self._changed) > _MAX_CHANGED:
            raise LookupError(self.value.name)

    def is_changed(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed again."""
        return tensor.name in self._changed
