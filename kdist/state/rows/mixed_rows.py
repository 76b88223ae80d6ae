"""Operations that take several rows at once, as a mean over the rows does, and whether that shows in outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from kdist.state.graphs.graph_function import NUM_ROWS
from kdist.state.graphs.row_free import RowFree
from kdist.state.rows.means_and_sums import RANGES, MeansAndSums, takes_all_rows

_REDUCTIONS = ("Mean", "Sum", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin")
_AXIS = {  # the input of an operation that says along which axes it computes
    **dict.fromkeys((*_REDUCTIONS, "Cumsum", "Cumprod", "ReverseV2", "ExpandDims"), 1),
    **dict.fromkeys(("Roll", "GatherV2"), 2),
}


def first_mixed(found: MeansAndSums, outputs: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]) -> tf.Operation | None:
    """Returns the first operation that makes rows of a network's outputs depend on other rows; `None` if none is seen.

    Nothing is seen behind what sends rows, draws an order, or calls Python, and in branches, loops and functions.

    Args:
        found: `MeansAndSums` of the data.
        outputs: sequence of tensors of the graph that is being traced; those of the data are left out.
        fixed: sequence of tensors that do not count as computed from rows.
    """
    outputs = [each for each in outputs if not found.is_leaf(each)]
    operations = RowFree(fixed, found.depends_on_rows).followed(outputs, found.is_leaf) if outputs else ()
    mixing = next((each for each in operations if _may_mix_rows(each, found)), None)
    if mixing is None:
        return None
    with contextlib.suppress(Exception):  # a check must not end a training
        if _is_changed_by_others(found, outputs, fixed):
            return mixing
    return None


def _may_mix_rows(operation: tf.Operation, found: MeansAndSums) -> bool:
    """Returns whether an operation takes several rows at once, or some of them, along the first axis."""

    def has_rows(tensor: tf.Tensor) -> bool:
        return bool(tensor.shape.rank) and tensor.shape[0] in (None, found.length) and found.depends_on_rows(tensor)

    kind, inputs = operation.type, operation.inputs
    if kind in _AXIS:
        axes = tf.get_static_value(inputs[_AXIS[kind]])
        rank = inputs[0].shape.rank
        return axes is not None and bool(rank) and any(np.ravel(axes) % rank == 0) and has_rows(inputs[0])
    if kind == "StridedSlice":
        return has_rows(inputs[0]) and not takes_all_rows(operation)
    if kind == "MatMul":
        return has_rows(inputs[1]) or (operation.get_attr("transpose_a") and has_rows(inputs[0]))
    if kind == "Einsum":
        terms, result = operation.get_attr("equation").decode().split("->")
        named = zip(terms.split(","), inputs, strict=True)
        return any(term[:1].isalpha() and term[0] != result[:1] and has_rows(each) for term, each in named)
    return False


def _is_changed_by_others(found: MeansAndSums, outputs: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]) -> bool:
    """Returns whether the first or the last row of outputs changes with the other rows of the data."""
    known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
    number = found.length or NUM_ROWS
    with tf.init_scope():
        function, tolerance = found.function_of(outputs, known, for_other_numbers=False, are_moved=True)
        for bounds in RANGES:
            with contextlib.suppress(tf.errors.OpError, ValueError):  # as of integers that no table has
                rows_of = found.made_up(bounds, 2 * number)
                rows, others = list(range(number)), list(range(number, 2 * number))
                for place, changed in (0, [*rows[:1], *others[1:]]), (-1, [*others[:-1], *rows[-1:]]):
                    pairs = zip(function(*rows_of(rows)), function(*rows_of(changed)), strict=True)
                    if any(_differ(one.numpy(), other.numpy(), place, tolerance) for one, other in pairs):
                        return True
    return False


def _differ(one: np.ndarray, other: np.ndarray, place: int, tolerance: float) -> bool:
    """Returns whether a row of two arrays differs."""
    if not (one.ndim and len(one) and one.shape == other.shape):
        return False
    return not np.allclose(one[place], other[place], rtol=tolerance, atol=tolerance, equal_nan=True)
