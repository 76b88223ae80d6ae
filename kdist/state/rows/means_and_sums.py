"""Whether a number of a step's graph is a mean or a sum over rows: it is computed for a few, and for parts of these."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from kdist._tf_internals import without_tracing_warnings
from kdist.state.graphs.gradients import gradients_of
from kdist.state.graphs.graph_function import FEW_ROWS, MAX_BYTES, NUM_ROWS, UNKNOWN_SIZE, acts, function_of, num_bytes
from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.graphs.row_free import ComputedFrom, RowFree

_NUM_FIRST = 2  # of the made-up rows
RANGES: tuple[tuple[float, float, int], ...] = (
    (-1.0, 1.0, 2),
    (0.1, 0.9, 2),  # which have a logarithm
    (0.0, 1.0, 10),
)
"""Of made-up numbers, and of integers."""

_CHOOSING = ("Where", "Unique", "DynamicPartition", "ListDiff", "NonMaxSuppression", "StringSplit")
_ORDERING = ("TopK", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ArgMax", "ArgMin")  # which few rows may not show
_EXTREMES = ("Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm")  # equal for parts, by chance
_LINEAR = (  # in what has no rows any more
    *("Sum", "Mean", "Add", "AddV2", "AddN", "Sub", "Neg", "Identity", "IdentityN", "Cast"),
    *("Pack", "Reshape", "Squeeze", "ExpandDims", "ConcatV2", "Transpose"),
)
QUOTIENTS = ("Div", "RealDiv", "DivNoNan")
OF_EACH = (
    *("Identity", "Cast", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalNot"),
    *("LogicalAnd", "LogicalOr", "Mul", "Add", "AddV2", "Sub", "Neg", "Abs", "Square"),
    *("Maximum", "Minimum", "SelectV2"),
)
"""Operations on each element."""

Kind = Literal["mean", "sum", "other"]


class MeansAndSums:
    """Finds whether a tensor of the graph that is being traced is a mean or a sum over the rows of a step's data.

    What the tensor is computed by is copied into a function of its own, that is run on made-up rows with the weights
    as they are, and moved ones if these tell nothing. It writes nothing, sends nothing and draws nothing.

    Args:
        leaves: sequence of tensors of the step's data.
        with_rows: sequence of int, the places of those that have rows.
        depends_on_rows: callable that takes a tensor of the graph and returns whether it is computed from rows.

    Attributes:
        leaves: sequence of tensors of the step's data.
        depends_on_rows: callable, as given.
        length: int or `None`, the number of rows, if the graph knows it. It may be a constant of the graph then.
    """

    def __init__(
        self, leaves: Sequence[Any], with_rows: Sequence[int], depends_on_rows: Callable[[tf.Tensor], bool]
    ) -> None:
        self.leaves = leaves
        self._with_rows = with_rows
        self.depends_on_rows = depends_on_rows
        self._keys = {tensor_key(each) for each in leaves}
        self._are_ends = False
        self._num_rows = NUM_ROWS
        self._is_sending = ComputedFrom(acts)
        self._is_chosen = ComputedFrom(lambda operation: operation.type.startswith(_CHOOSING))
        self._are_numbers: dict[tuple[Any, str], bool] = {}
        self._lengths = {leaves[place].shape[0] for place in with_rows if self._can_be_made_up(place)}
        self.length = next(iter(self._lengths), None)

    def at(self, ends: Sequence[tf.Tensor]) -> MeansAndSums:
        """Returns the same for what is computed from some tensors, for which rows are made up in the place of the data.

        Args:
            ends: sequence of tensors, each of the data, or with a row for each of the data.
        """
        found = copy.copy(self)
        without_rows = self.leaves_without_rows()
        found.leaves, found._keys = ends, {tensor_key(each) for each in ends}
        found._with_rows = [place for place, each in enumerate(ends) if tensor_key(each) not in without_rows]
        found._lengths = {ends[place].shape[0] for place in found._with_rows}
        found._are_ends = True
        found._num_rows = num_rows(ends)
        return found

    def leaves_without_rows(self) -> set[Any]:
        """Returns the keys of those tensors for which a value is made up that has no rows."""
        return {tensor_key(each) for place, each in enumerate(self.leaves) if place not in self._with_rows}

    def can_run(self, value: tf.Tensor, fixed: Sequence[tf.Tensor]) -> bool:
        """Returns whether a number and its gradients can be computed for other numbers of rows than a step has."""
        known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
        num_successes = 0
        with tf.init_scope():
            function, _ = self.function_of([value], known, are_moved=True, max_bytes=None)

            def differentiated(*data: tf.Tensor) -> list[tf.Tensor]:
                data = tuple(map(tf.identity, data))
                (number,) = function.python_function(*data)
                floats = [each for each in data if each.dtype.is_floating]
                gradients = gradients_of(number, floats) if number.dtype.is_floating and floats else []
                return [number, *(tf.convert_to_tensor(each) for each in gradients if each is not None)]

            run = without_tracing_warnings(tf.function(differentiated, autograph=False, reduce_retracing=True))
            for times in (1, 2, 4) if self._num_rows == FEW_ROWS else (1, 2, 4, 8, 16):
                number = times * self._num_rows
                for bounds in RANGES:
                    with contextlib.suppress(Exception):
                        run(*self.made_up(bounds, number)(range(number)))
                        num_successes += 1
                        break
        return num_successes > 1

    def is_leaf(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is one for which rows are made up."""
        return tensor_key(tensor) in self._keys

    def can_tell(self, value: tf.Tensor) -> bool:
        """Returns whether rows can be made up for what a tensor is computed from."""
        return (
            len(self._lengths) == 1
            and all(map(self._can_be_made_up, range(len(self.leaves))))
            and all(each.graph in (value.graph, value.graph.outer_graph) for each in self.leaves)
        )

    def kind(self, value: tf.Tensor, fixed: Sequence[tf.Tensor]) -> Kind | None:
        """Returns what a tensor is of the same for parts of the rows; `None` if that is not known.

        Args:
            value: symbolic tensor; its elements are added up if each is of a row.
            fixed: sequence of tensors of known shapes that are taken to be a number that is known.
        """
        if not self.can_tell(value):
            return None
        if self.is_leaf(value):
            return "sum"
        known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
        found: set[Kind | None] | None = None  # where it cannot be copied
        with contextlib.suppress(Exception), tf.init_scope():  # a check must not end a training
            for are_moved in (True, False):  # a weight that is 0 first may be added to a sum, or be a factor
                limit = None if self._are_ends else MAX_BYTES
                function, tolerance = self.function_of([value], known, are_moved=are_moved, max_bytes=limit)
                # What some rows show as a mean, others may show to be none.
                found = set.union(*(self._kinds(function, bounds, tolerance) for bounds in RANGES))
                if found - {None}:
                    break
        if found == set():
            return "other"  # it needs a certain number of rows
        kinds = (found or set()) - {None}
        if kinds == {"sum"} and self.length is None and self.relates_rows(value, known):
            return "other"
        return kinds.pop() if len(kinds) == 1 else "other" if kinds else None

    def function_of(
        self, values: Sequence[tf.Tensor], fixed: Sequence[tf.Tensor], *, for_other_numbers: bool = True, **options: Any
    ) -> tuple[Any, float]:
        """See `graph_function.function_of`, for other numbers of rows than the graph knows, or for that."""
        length = self.length if for_other_numbers else None
        return function_of(values, self.leaves, fixed, length, self._is_of_message, **options)

    def _kinds(
        self, function: Callable[..., list[tf.Tensor]], bounds: tuple[float, float, int], tolerance: float
    ) -> set[Kind | None]:
        """Returns what a value is for made-up rows, `None` if these say nothing, and nothing if it fails for them."""
        try:
            return {_kind(self._computed(function, bounds), self._num_rows, tolerance)}
        except (tf.errors.OpError, ValueError, ArithmeticError):  # as of integers that no table has
            return set()

    def relates_rows(self, value: tf.Tensor, fixed: Sequence[tf.Tensor]) -> bool:
        """Returns whether a mean or a sum is of more than a number for each row, as of what is divided by a sum.

        A tensor of known shape has no rows any more. It may be added up, and may not be used otherwise. The number of
        all rows may.

        Args:
            value: symbolic tensor.
            fixed: sequence of tensors that do not count as computed from rows.
        """
        free = RowFree(fixed, self.depends_on_rows)
        for operation in free.followed([value], self.is_leaf):
            if operation.type == "Mean" and _is_without_rows(operation.outputs[0]) and self._takes_chosen(operation):
                return True
            if self._are_ends and operation.type.startswith(_ORDERING):
                return True  # what orders each row by itself comes before the ends
            if operation.type in _LINEAR:
                continue
            if operation.type in _EXTREMES and _removes_rows(operation):
                return True
            inputs = [each for each in operation.inputs if not free(each)]
            related = [each for each in inputs if _is_without_rows(each) and not self.is_number_of_rows(each)]
            has_rows = any(not each.shape.is_fully_defined() for each in inputs)
            is_scaled = (
                len(related) == 1
                and not has_rows
                and (
                    operation.type == "Mul"
                    or (operation.type in QUOTIENTS and operation.inputs[0].name == related[0].name)
                )
            )
            if related and not is_scaled:
                return True
        return False

    def is_number_of_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the shapes of tensors that have all rows, and from nothing else."""
        key = tensor.graph, tensor.name
        if key not in self._are_numbers:
            self._are_numbers[key] = self._finds_number(tensor)
        return self._are_numbers[key]

    def _finds_number(self, tensor: tf.Tensor) -> bool:
        def is_end(each: tf.Tensor) -> bool:
            return each.op.type in ("Shape", "Size") or not self.depends_on_rows(each)

        found = [tensor] if is_end(tensor) else list(computed_of([tensor], is_end))
        if not all(each.shape.is_fully_defined() and each.op.type != "Placeholder" for each in found):
            return False
        operations = [tensor.op] + [i.op for each in found for i in each.op.inputs]
        shapes = [each for each in operations if each.type in ("Shape", "Size")]
        return bool(shapes) and not any(map(self._is_chosen, shapes))

    def is_chosen(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from rows of which a step has chosen some."""
        return self._is_chosen(tensor.op)

    def _takes_chosen(self, operation: tf.Operation) -> bool:
        """Returns whether an operation takes rows of which a step has chosen some, as by `tf.boolean_mask`."""
        return any(self._is_chosen(each.op) for each in operation.inputs if not each.shape.is_fully_defined())

    def _is_of_message(self, operation: tf.Operation) -> bool:
        """Returns whether an operation's results are those of a message, and so do not depend on this rank's rows."""
        return self._is_sending(operation) and all(
            _is_without_rows(each) and not self.depends_on_rows(each) for each in operation.outputs
        )

    def _can_be_made_up(self, place: int) -> bool:
        leaf = self.leaves[place]
        is_plain = tf.is_symbolic_tensor(leaf) and leaf.shape.rank is not None
        is_number = is_plain and (leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype in (tf.bool, tf.string))
        return bool(is_number) and not (place in self._with_rows and not leaf.shape.rank)

    def _computed(self, function: Callable[..., list[tf.Tensor]], bounds: tuple[float, float, int]) -> list[np.ndarray]:
        """Returns a value for some rows, for these twice, for the first of them, and for the others."""
        rows_of = self.made_up(bounds)

        def run(chosen: Sequence[int]) -> np.ndarray:
            return np.asarray(function(*rows_of(chosen))[0], np.float64)

        order = list(range(self._num_rows))
        return [run(each) for each in (order, order * 2, order[:_NUM_FIRST], order[_NUM_FIRST:])]

    def made_up(
        self, bounds: tuple[float, float, int], number: int = NUM_ROWS
    ) -> Callable[[Sequence[int]], list[tf.Tensor]]:
        """Returns a function that returns the leaves with some of the made-up rows.

        Args:
            bounds: tuple, those of floats, and above integers; one of `RANGES`.
            number: int, how many rows are made up.
        """
        generator = np.random.default_rng(RANGES.index(bounds))
        rows = [self._made_up_leaf(place, generator, bounds, number) for place in range(len(self.leaves))]
        return lambda chosen: [
            tf.constant(each[chosen] if place in self._with_rows else each) for place, each in enumerate(rows)
        ]

    def _made_up_leaf(
        self, place: int, generator: np.random.Generator, bounds: tuple[float, float, int], number: int
    ) -> np.ndarray:
        leaf = self.leaves[place]
        shape = [UNKNOWN_SIZE if size is None else size for size in leaf.shape]
        if place in self._with_rows:
            shape[0] = number
        if leaf.dtype == tf.string:
            return np.full(shape, b"a", object)
        if not leaf.dtype.is_floating:
            return generator.integers(0, bounds[2], shape).astype(leaf.dtype.as_numpy_dtype)
        if bounds[2] > 2:  # whole numbers, as of masks
            return generator.integers(0, 2, shape).astype(leaf.dtype.as_numpy_dtype)
        return generator.uniform(*bounds[:2], shape).astype(leaf.dtype.as_numpy_dtype)


def has_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor that depends on rows may have some, as a list of tensors may."""
    return tensor.dtype == tf.variant or not tensor.shape.is_fully_defined()


def _removes_rows(operation: tf.Operation) -> bool:
    return has_rows(operation.inputs[0]) and not has_rows(operation.outputs[0])


def takes_all_rows(operation: tf.Operation) -> bool:
    """Returns whether a `StridedSlice` takes all along the first axis, as `x[:, 0]` and `x[..., 0]` do."""
    strides = tf.get_static_value(operation.inputs[3])
    if strides is None or strides[0] != 1:
        return False
    is_first_whole = operation.get_attr("begin_mask") & operation.get_attr("end_mask") & 1
    is_ellipsis = operation.get_attr("ellipsis_mask") & 1 and len(strides) <= operation.inputs[0].shape.rank
    return bool(is_first_whole or is_ellipsis)


def _is_without_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.is_fully_defined() and (tensor.dtype.is_floating or tensor.dtype.is_bool)


def num_rows(tensors: Sequence[tf.Tensor]) -> int:
    """Returns how many rows to make up for tensors that have rows."""
    return FEW_ROWS if any(num_bytes(each, None) > MAX_BYTES for each in tensors) else NUM_ROWS


def _kind(found: list[np.ndarray], number: int, tolerance: float) -> Kind | None:
    """Returns what a value is; see `MeansAndSums._computed`."""
    if found[0].shape != found[1].shape:  # an element for each row
        found = [np.sum(each) for each in found]
    once, twice, first, others = found
    size = max(np.linalg.norm(np.ravel(each)) for each in found)
    if not np.isfinite(size) or np.linalg.norm(np.ravel(once)) <= 10 * tolerance * size:
        return None

    def equal(one: np.ndarray, other: np.ndarray) -> bool:
        return bool(np.linalg.norm(np.ravel(one - other)) <= tolerance * size)

    if equal(twice, once) and equal((_NUM_FIRST * first + (number - _NUM_FIRST) * others) / number, once):
        return "mean"
    return "sum" if equal(twice, 2 * once) and equal(first + others, once) else "other"
