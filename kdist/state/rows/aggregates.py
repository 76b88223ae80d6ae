"""Sums and means over rows of which a graph computes a number, and that number computed again from other ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of
from kdist.state.graphs.recomputed import RowReduction
from kdist.state.graphs.row_free import RowFree
from kdist.state.rows.frontier import Frontier
from kdist.state.rows.means_and_sums import OF_EACH, Kind, MeansAndSums, has_rows, takes_all_rows

_ADDING = (
    *("Sum", "Mean", "MatMul", "BatchMatMulV2", "Einsum", "UnsortedSegmentSum", "SegmentSumV2", "DenseBincount"),
    "Cast",  # of a number of rows, or of some rows
)
_OF_INTEGERS = (
    *("Cast", "Sum", "AddV2", "Add", "Sub", "Mul", "Identity", "Pack", "Prod", "StridedSlice", "Maximum", "Minimum"),
)
_MAX_AGGREGATES, _MAX_CHANGED = 16, 2000  # as finding out about each takes time


class Aggregates(Frontier):
    """The sums and means over rows of which a number of a graph is computed, where nothing else of it relates rows.

    Args:
        value: symbolic tensor of a known shape.
        found: `MeansAndSums` of the data.
        fixed: sequence of tensors that do not count as computed from rows.
        means: sequence of tensors that count as means over rows.

    Raises:
        LookupError: if the number relates rows in another way, or that is not known.
    """

    def __init__(
        self,
        value: tf.Tensor,
        found: MeansAndSums,
        fixed: Sequence[tf.Tensor],
        means: Sequence[tf.Tensor],
    ) -> None:
        super().__init__()
        self._found = found
        self._fixed = [each for each in fixed if tf.is_symbolic_tensor(each)]
        self._means = {each.name for each in means if tf.is_symbolic_tensor(each)}
        self._is_fixed = RowFree(self._fixed, found.depends_on_rows)
        self._names: set[str] = set()  # of aggregates
        if self._is_known(value) or not value.shape.is_fully_defined():
            raise LookupError(value.name)
        for operation in self._is_fixed.followed([value], lambda each: self._is_known(each) or found.is_leaf(each)):
            self._add(operation)
        if value.name not in self.changed and not any(
            each.tensor is value and each.count is not None for each in self.listed
        ):
            raise LookupError(value.name)  # a mean or a sum itself

    def _is_known(self, tensor: tf.Tensor) -> bool:
        return self._is_fixed(tensor) or tensor.name in self._means

    def _add(self, operation: tf.Operation) -> None:
        inputs = [each for each in operation.inputs if not self._is_fixed(each)]
        for each in inputs:
            if each.name in self._means:
                self._list(each, "mean")
        known = self.changed | self._names
        of_all = [each for each in inputs if not has_rows(each) and each.name not in known]
        of_all = [each for each in of_all if not self._found.is_number_of_rows(each)]
        if any(each.dtype.is_floating or each.dtype.is_complex for each in of_all):
            raise LookupError(operation.type)  # as of a maximum
        if of_all and operation.type not in _OF_INTEGERS:
            raise LookupError(operation.type)
        # Rows that are computed again from aggregates are this rank's, still.
        is_changed = operation.type not in ("Shape", "Size") and any(each.name in known for each in inputs)
        if is_changed:
            if len(self.changed) > _MAX_CHANGED:
                raise LookupError(operation.type)
            self._change(operation)
        of_rows = any(map(has_rows, inputs)) or not inputs
        for output in operation.outputs:
            is_count = output.dtype.is_integer and operation.type == "Sum" and of_rows
            of_integers = operation.type == "Cast" and not operation.inputs[0].dtype.is_floating and not is_changed
            is_number = output.dtype.is_floating and (of_rows or of_integers)
            if not has_rows(output) and (is_count or is_number):
                self._add_aggregate(output)

    def _add_aggregate(self, output: tf.Tensor) -> None:
        if output.op.type not in _ADDING or len(self.listed) == _MAX_AGGREGATES:
            raise LookupError(output.op.type)
        kind = self._kind(output)
        if kind == "sum" or (kind == "mean" and output.dtype.is_floating):
            self._list(output, kind)
        elif output.op.type == "Sum" and self._adds_up_each_row(output.op):
            self._list(output, "sum")
        elif output.op.type == "Mean":
            rows = output.op.inputs[0]
            if self._kind(tf.reduce_sum(rows, output.op.inputs[1])) != "sum":
                raise LookupError(output.op.name)
            self._list(output, "mean", tf.cast(tf.size(rows), tf.float64) / max(1, output.shape.num_elements()))
        else:
            raise LookupError(output.op.name)

    def _list(self, tensor: tf.Tensor, kind: Literal["mean", "sum"], count: tf.Tensor | None = None) -> None:
        if tensor.name not in self._names:
            self._names.add(tensor.name)
            self.listed.append(RowReduction(tensor, kind, count))

    def _kind(self, tensor: tf.Tensor) -> Kind | None:
        fixed = [*self._fixed, *(each.tensor for each in self.listed)]
        kind = self._found.kind(tensor, fixed)
        return "other" if kind == "mean" and self._found.relates_rows(tensor, fixed) else kind

    def _adds_up_each_row(self, operation: tf.Operation) -> bool:
        """Returns whether a sum is of numbers that are each computed from one row; it may be 0 for made-up rows."""
        leaves = {each.name for each in self._found.leaves if tf.is_symbolic_tensor(each)}

        def is_end(tensor: tf.Tensor) -> bool:
            return tensor.name in leaves or self._is_fixed(tensor)

        rows = operation.inputs[0]
        return all(_is_of_each_row(each, is_end) for each in ([] if is_end(rows) else computed_of([rows], is_end)))


def _is_of_each_row(tensor: tf.Tensor, is_end: Callable[[tf.Tensor], bool]) -> bool:
    operation: Any = tensor.op
    if operation.type == "StridedSlice":
        return takes_all_rows(operation)
    rows = [each for each in operation.inputs if not is_end(each) or not each.shape.is_fully_defined()]
    return operation.type in OF_EACH and all(each.shape.rank == tensor.shape.rank for each in rows)
