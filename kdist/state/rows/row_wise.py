"""Which tensors of a step's graph hold rows that are each computed from one row of the data: found by made-up rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.state.graphs.graph_function import MAX_BYTES, is_drawn, num_bytes
from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.graphs.row_free import RowFree
from kdist.state.rows.compared import Compared, compare, holds_rows_of_parts
from kdist.state.rows.means_and_sums import OF_EACH, RANGES, MeansAndSums, has_rows, num_rows, takes_all_rows

_CHOOSING = ("Slice", "StridedSlice", "GatherV2")
_SHAPES = ("Shape", "ShapeN", "Size")
_LOOKUPS = ("ResourceGather", "ResourceGatherNd")  # of a variable's rows, by indices
_FILLING = ("Fill", "ZerosLike", "OnesLike", "BroadcastTo")  # all rows alike
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
        self._of_places: set[Any] = set()  # tensors of shapes whose rows are of the places of rows
        self._filled: set[Any] = set()  # tensors that hold the same in each row
        self._has_one_each: set[Any] = set()  # tensors that hold a row for each of the data
        self._leaves = {tensor_key(each) for each in found.leaves}
        self._without_rows = found.leaves_without_rows()

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, which has been followed, holds rows that are each computed from one of the data."""
        is_leaf = self._is_leaf(tensor) and not self.is_of_data_without_rows(tensor)
        return self._is_known.get(tensor_key(tensor), False) or is_leaf

    def is_of_data_without_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is of the data, and has no rows: each rank takes its own."""
        return tensor_key(tensor) in self._without_rows

    def is_shape(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, which has been followed, is the shape of rows that differ in their number alone."""
        operation = tensor.op
        return operation.type == "Shape" and self(operation.inputs[0]) and _is_open_in_rows(operation.inputs[0])

    def follow(self, value: tf.Tensor, fixed: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> RowFree:
        """Finds out about all that a tensor is computed from.

        Args:
            value: tensor of the graph that is being traced.
            fixed: sequence of tensors that do not count as computed from rows.
            means: sequence of tensors that count as means over rows; what computes them is left out.

        Returns:
            Which of the tensors are not computed from rows.
        """
        free = RowFree(fixed, self._found.depends_on_rows)
        left_out = {tensor_key(each) for each in means}
        operations = [
            operation
            for operation in free.followed([value], lambda each: tensor_key(each) in left_out or self._is_end(each))
            if not all(tensor_key(each) in self._is_known for each in operation.outputs)
        ]
        for part in _parts(operations):
            checked = [each for operation in part for each in operation.outputs if _can_be_compared(each)]
            data = self._found.at(self._ends(part, free, left_out))
            found = self._compared_first(data, checked, [*fixed, *means])
            for operation in part:
                self._note(operation, free, found)
        return free

    def relates(self, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> bool:
        """Returns whether tensors, used together, are found to hold other rows than for parts of the data.

        The order of the rows does not count.

        Args:
            tensors: sequence of tensors of the graph that is being traced.
            fixed: see `follow`.
            means: see `follow`.
        """
        checked = [tf.identity(each) if self._is_leaf(each) else each for each in tensors]
        try:
            found = list(self._computed(self._found, checked, [*fixed, *means]))
        except Exception:  # a check must not end a training
            return False
        needs_rows = not found  # more than one, as the three largest do
        return needs_rows or not all(holds_rows_of_parts(computed, tolerance) for computed, _, tolerance in found)

    def data_of(self, value: tf.Tensor, fixed: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> MeansAndSums:
        """Returns `MeansAndSums` of the last tensors on the ways to one that hold a row for each of the data.

        Args:
            value: see `follow`.
            fixed: see `follow`.
            means: see `follow`.
        """
        free = self.follow(value, fixed, means)
        if self._is_end(value):
            return self._found.at([value])
        return self._found.at(self._ends([value.op], free, {tensor_key(each) for each in means}))

    def _ends(self, operations: Sequence[tf.Operation], free: RowFree, left_out: set[Any]) -> list[tf.Tensor]:
        """Returns the last tensors before some operations that hold a row for each of the data, or are of the data."""

        def is_left_out(tensor: tf.Tensor) -> bool:
            return self._is_end(tensor) or tensor_key(tensor) in left_out or free(tensor)

        before = {each.op.name: each.op for each in computed_of([each.outputs[0] for each in operations], is_left_out)}
        inputs = [each for operation in before.values() for each in operation.inputs]
        return list({tensor_key(each): each for each in inputs if self._is_end(each)}.values())

    def _is_end(self, tensor: tf.Tensor) -> bool:
        return tensor_key(tensor) in self._has_one_each or self._is_leaf(tensor)

    def _is_leaf(self, tensor: tf.Tensor) -> bool:
        return tensor_key(tensor) in self._leaves

    def _note(self, operation: tf.Operation, free: RowFree, found: dict[str, Compared]) -> None:
        inputs = [each for each in operation.inputs if not free(each)]
        keys = [tensor_key(each) for each in inputs]
        is_of_shapes = operation.type in _SHAPES or (bool(inputs) and all(key in self._of_shapes for key in keys))
        is_of_places = any(key in self._of_places for key in keys)
        are_clear = not is_of_places and all(map(self._can_be_used, inputs))
        is_filled = (
            bool(inputs) and not is_of_places and all(key in self._of_shapes | self._filled for key in keys)
        ) or (operation.type in _FILLING and are_clear)
        for output in operation.outputs:
            key = tensor_key(output)
            compared = found.get(output.name, Compared(varies=not _can_be_compared(output)))
            if is_of_shapes and operation.type not in _FILLING and not is_drawn(operation):
                self._of_shapes.add(key)
                if is_of_places or (has_rows(output) and not compared.is_constant):
                    self._of_places.add(key)
            elif is_of_shapes or (is_filled and compared.is_equal):
                self._filled.add(key)
                self._is_clear.add(key)
            elif (
                are_clear
                and has_rows(output)
                and not _chooses(operation, inputs)
                and (compared.varies or self._is_of_each_element(output, inputs))
            ):
                self._is_clear.add(key)
            self._is_known[key] = compared.is_equal and key in self._is_clear
            if self._is_known[key] and compared.has_one_each and not self._found.is_chosen(output):
                self._has_one_each.add(key)

    def _can_be_used(self, tensor: tf.Tensor) -> bool:
        """Returns whether nothing is hidden by using a tensor together with rows."""
        key = tensor_key(tensor)
        is_of_shape = key in self._of_shapes and (tensor.dtype.is_integer or has_rows(tensor))
        return key in self._is_clear or is_of_shape or self._is_leaf(tensor)

    def _is_of_each_element(self, output: tf.Tensor, inputs: Sequence[tf.Tensor]) -> bool:
        """Returns whether each element is known to be computed from one, also where made-up rows all give the same."""
        if output.op.type in _LOOKUPS:  # of a variable that begins with zeros, say
            by_place = output.op.type == "ResourceGather" and output.op.get_attr("batch_dims")
            return not by_place and all(each is output.op.inputs[1] and self(each) for each in inputs)
        return output.op.type in OF_EACH and all(
            each.shape.rank == output.shape.rank and each.shape[0] is None and self(each) for each in inputs
        )

    def _compared_first(
        self, data: MeansAndSums, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]
    ) -> dict[str, Compared]:
        """Returns by name what is known of as many of the first tensors as can be computed for made-up rows."""
        found: dict[str, Compared] = {}
        least, number = 0, len(tensors)
        most = number
        while least < most:
            try:
                found = self._compared(data, tensors[:number], fixed)
                least = number
            except Exception:  # a check must not end a training
                most = number - 1
            number = (least + most + 1) // 2
        return found

    def _compared(
        self, data: MeansAndSums, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]
    ) -> dict[str, Compared]:
        """Compares by name what tensors hold for made-up rows, and for parts of them.

        Raises:
            LookupError: if what the tensors are computed by cannot run by itself, or not for made-up rows.
        """
        found = [
            [compare(*each, number=number, tolerance=tolerance) for each in computed]
            for computed, number, tolerance in self._computed(data, tensors, fixed)
        ]
        if not found:
            raise LookupError(tensors[0].name)
        return {tensor.name: Compared.of(each) for tensor, *each in zip(tensors, *found, strict=True)}

    def _computed(
        self, data: MeansAndSums, tensors: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor]
    ) -> Iterator[tuple[list[list[np.ndarray]], int, float]]:
        """Yields what tensors hold for each kind of made-up rows, and for parts of them, as `compare` takes it.

        Yields:
            The arrays of each tensor, the number of rows, and by how much numbers may differ.

        Raises:
            LookupError: see `_compared`.
        """
        known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
        number = num_rows([*data.leaves, *tensors])
        rows, others = list(range(number)), list(range(number, 2 * number))
        first, second = rows[:1], rows[1:]
        with tf.init_scope():
            function, tolerance = data.function_of(tensors, known, are_moved=True, max_bytes=None)
        for bounds in RANGES:
            with contextlib.suppress(tf.errors.OpError, ValueError, ArithmeticError):  # as of what no table has
                with tf.init_scope():
                    rows_of = data.made_up(bounds, 2 * number)
                    made_up = map(rows_of, (rows, first, second, second + first, others))
                    computed = zip(*(function(*each) for each in made_up), strict=True)
                    arrays = [list(map(np.asarray, each)) for each in computed]
                yield arrays, number, _EXACT * tolerance


def _parts(operations: Sequence[tf.Operation]) -> Iterator[list[tf.Operation]]:
    """Yields parts of a list of operations, whose outputs are not too large together for what is made up."""
    part: list[tf.Operation] = []
    size = 0
    for operation in operations:
        of_this = sum(num_bytes(each, None) for each in operation.outputs if _can_be_compared(each))
        if part and size + of_this > MAX_BYTES:
            yield part
            part, size = [], 0
        part.append(operation)
        size += of_this
    if part:
        yield part


def _chooses(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> bool:
    """Returns whether an operation may choose rows by their places."""
    if operation.type not in _CHOOSING or not any(each is operation.inputs[0] for each in inputs):
        return False
    if operation.inputs[0].shape.rank and operation.inputs[0].shape[0] is not None:  # as of time steps
        return operation.type == "Slice" or (operation.type == "StridedSlice" and operation.inputs[1].shape[0] != 1)
    if operation.type == "StridedSlice":
        return not takes_all_rows(operation)
    of_place = [tf.get_static_value(each) for each in operation.inputs[1:]]
    if operation.type == "Slice":
        return any(each is None for each in of_place) or of_place[0][0] != 0 or of_place[1][0] != -1
    indices, axis = operation.inputs[1], of_place[1]
    return axis is None or (int(axis) == 0 and not any(each is indices for each in inputs))


def _is_open_in_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is not None and tensor.shape[1:].is_fully_defined()


def can_relate_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor that depends on rows holds numbers of some of them, or several numbers of all."""
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer
    return _can_be_compared(tensor) or bool(is_number and tensor.shape.rank)


def _can_be_compared(tensor: tf.Tensor) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool
    return bool(is_number) and has_rows(tensor) and tensor.shape.rank not in (None, 0)
