"""Which tensors of a step's graph hold rows that are each computed from one row of the data: found by made-up rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.state.graphs.graph_function import MAX_BYTES, NUM_ROWS, num_bytes
from kdist.state.graphs.means_and_sums import OF_EACH, RANGES, MeansAndSums, has_rows, takes_all_rows
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.row_free import RowFree

_FEW_ROWS = 3  # where rows are large
_CHOOSING = ("Slice", "StridedSlice", "GatherV2")
_SHAPES = ("Shape", "ShapeN", "Size")
_EXACT = 0.1  # of the tolerance of means: what is not found costs a longer message alone


class RowWise:
    """Finds which tensors hold, for some rows, what they hold for each of them alone, one after another.

    So a network's outputs do, and what is computed of each. A row of the data may be several rows of the tensor, as of
    its time steps, or none. Tensors are computed for some made-up rows, for two parts of these, for the parts in the
    other order, and for other rows. One that is the same for all of them says nothing, nor does what is computed from
    it, unless each of its elements is computed from one.

    Args:
        found: `MeansAndSums` of the data.
    """

    def __init__(self, found: MeansAndSums) -> None:
        self._found = found
        self._is_known: dict[Any, bool] = {}
        self._is_clear: set[Any] = set()  # tensors that hide no relation of rows
        self._of_shapes: set[Any] = set()
        self._leaves = {tensor_key(each) for each in found.leaves}

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, which has been followed, holds rows that are each computed from one of the data."""
        return self._is_known.get(tensor_key(tensor), False) or self._is_leaf(tensor)

    def is_shape(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, which has been followed, is the shape of rows that differ in their number alone."""
        operation = tensor.op
        return operation.type == "Shape" and self(operation.inputs[0]) and _is_open_in_rows(operation.inputs[0])

    def follow(self, value: tf.Tensor, fixed: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        """Finds out about all that a tensor is computed from.

        Args:
            value: tensor of the graph that is being traced.
            fixed: sequence of tensors that do not count as computed from rows.
            means: sequence of tensors that count as means over rows; what computes them is left out.
        """
        free = RowFree(fixed, self._found.depends_on_rows)
        ends = self._leaves | {tensor_key(each) for each in means}
        operations = [
            operation
            for operation in free.followed([value], lambda each: tensor_key(each) in ends)
            if not all(tensor_key(each) in self._is_known for each in operation.outputs)
        ]
        checked = [each for operation in operations for each in operation.outputs if _can_be_compared(each)]
        found = self._compared_first(checked, [*fixed, *means])
        for operation in operations:
            self._note(operation, free, found)

    def _is_leaf(self, tensor: tf.Tensor) -> bool:
        return tensor_key(tensor) in self._leaves

    def _note(self, operation: tf.Operation, free: RowFree, found: dict[str, tuple[bool, bool]]) -> None:
        inputs = [each for each in operation.inputs if not free(each)]
        are_shapes = bool(inputs) and all(tensor_key(each) in self._of_shapes for each in inputs)
        are_clear = all(tensor_key(each) in self._is_clear or self._is_leaf(each) for each in inputs)
        for output in operation.outputs:
            key = tensor_key(output)
            is_equal, varies = found.get(output.name, (False, not _can_be_compared(output)))
            if operation.type in _SHAPES or are_shapes:
                self._of_shapes.add(key)
                self._is_clear.add(key)
            elif (
                are_clear
                and has_rows(output)
                and not _chooses(operation, inputs)
                and (varies or _is_of_each_element(output, inputs))
            ):
                self._is_clear.add(key)
            self._is_known[key] = bool(is_equal) and key in self._is_clear and key not in self._of_shapes

    def _compared_first(self, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]) -> dict[str, tuple[bool, bool]]:
        """Returns by name what is known of as many of the first tensors as can be computed for made-up rows."""
        found: dict[str, tuple[bool, bool]] = {}
        least, number = 0, len(tensors)
        most = number
        while least < most:
            try:
                found = self._compared(tensors[:number], fixed)
                least = number
            except (LookupError, tf.errors.OpError):
                most = number - 1
            number = (least + most + 1) // 2
        return found

    def _compared(self, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]) -> dict[str, tuple[bool, bool]]:
        """Returns by name whether a tensor holds what it holds for parts of the rows, and whether it depends on them.

        Arrays are compared where they are computed, so that not all of them are kept.

        Raises:
            LookupError: if what the tensors are computed by cannot run by itself, or not for made-up rows.
        """
        known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
        found = []
        with tf.init_scope():
            function, tolerance = self._found.function_of(tensors, known, are_moved=True, max_bytes=None)

            def compare(*arrays: np.ndarray) -> np.ndarray:
                return np.array(_compare(*arrays, tolerance=_EXACT * tolerance))

            def compared(*data: Sequence[tf.Tensor]) -> tf.Tensor:
                computed = zip(*(function(*each) for each in data), strict=True)
                return tf.stack([tf.numpy_function(compare, each, tf.bool, stateful=False) for each in computed])

            run = tf.function(compared, autograph=False)
            number = _FEW_ROWS if any(num_bytes(each, None) > MAX_BYTES for each in tensors) else NUM_ROWS
            rows, others = list(range(number)), list(range(number, 2 * number))
            first, second = rows[: number // 3], rows[number // 3 :]
            for bounds in RANGES:
                rows_of = self._found.made_up(bounds, 2 * number)
                with contextlib.suppress(tf.errors.OpError, ValueError, ArithmeticError):  # as of what no table has
                    found.append(run(*map(rows_of, (rows, first, second, second + first, others))).numpy())
        if not found:
            raise LookupError(tensors[0].name)
        are_equal, vary = np.all([each[:, 0] for each in found], 0), np.any([each[:, 1] for each in found], 0)
        return {each.name: (bool(are_equal[i]), bool(vary[i])) for i, each in enumerate(tensors)}


def _is_of_each_element(output: tf.Tensor, inputs: Sequence[tf.Tensor]) -> bool:
    return output.op.type in OF_EACH and all(
        each.shape.rank == output.shape.rank and each.shape[0] is None for each in inputs
    )


def _chooses(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> bool:
    """Returns whether an operation may choose rows by their places."""
    if operation.type not in _CHOOSING or not any(each is operation.inputs[0] for each in inputs):
        return False
    if operation.type == "StridedSlice":
        return not takes_all_rows(operation)
    of_place = [tf.get_static_value(each) for each in operation.inputs[1:]]
    if operation.type == "Slice":
        return any(each is None for each in of_place) or of_place[0][0] != 0 or of_place[1][0] != -1
    indices, axis = operation.inputs[1], of_place[1]
    return axis is None or (int(axis) == 0 and not any(each is indices for each in inputs))


def _is_open_in_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is not None and tensor.shape[1:].is_fully_defined()


def _can_be_compared(tensor: tf.Tensor) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool
    return bool(is_number) and has_rows(tensor) and tensor.shape.rank not in (None, 0)


def _compare(*arrays: np.ndarray, tolerance: float) -> tuple[bool, bool]:
    """Returns whether an array is that of parts of the rows, in any order, and whether it is another for other rows.

    Args:
        *arrays: what is computed from all rows, from the first and the second part, from the second and the first
            together, and from other rows.
        tolerance: float, by how much of the largest number others may differ.
    """
    together, first, second, turned, others = (np.asarray(each, np.float64) for each in arrays)
    is_equal = all(
        whole.shape[1:] == one.shape[1:] == other.shape[1:]
        and _are_equal(np.ravel(whole), np.concatenate([np.ravel(one), np.ravel(other)]), tolerance)
        for whole, one, other in ((together, first, second), (turned, second, first))
    )
    return is_equal, not _are_equal(together, others, tolerance)


def _are_equal(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    are_finite = np.isfinite(one) & np.isfinite(other)
    are_same = np.isfinite(one) == np.isfinite(other)
    size = np.max(np.abs(one[are_finite]), initial=0.0)
    return bool(np.all(are_same) and np.all(np.abs(one - other)[are_finite] <= tolerance * size))
