"""The rows of which a graph computes what relates them, which can be computed again from those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.recomputed import RowReduction
from kdist.state.rows.frontier import Frontier
from kdist.state.rows.row_wise import RowWise

_MAX_ROWS, _MAX_CHANGED = 16, 2000  # as where a gradient is what relates rows


class RowFrontier(Frontier):
    """The last tensors of a graph that hold rows which are each computed from one, on all ways to some tensors.

    What comes after them can be computed again from the rows of all ranks, whatever it is.

    Args:
        values: symbolic tensors.
        rows: `RowWise` of the data.
        fixed: sequence of tensors that do not count as computed from rows.
        means: sequence of tensors that count as means over rows.

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
        super().__init__()
        keys_of_means = {tensor_key(each) for each in means}
        *_, free = (rows.follow(each, fixed, means) for each in values)

        def known(tensor: tf.Tensor) -> RowReduction | None:
            if tensor_key(tensor) in keys_of_means:
                return RowReduction(tensor, "mean")
            if rows(tensor):
                return RowReduction(tensor, "rows")
            return RowReduction(tensor, "shape") if rows.is_shape(tensor) else None

        self._follow(values, lambda each: free(each) or rows.is_of_data_without_rows(each), known, _MAX_CHANGED)
        if not 0 < sum(each.kind == "rows" for each in self.listed) <= _MAX_ROWS:
            raise LookupError(values[0].name)
