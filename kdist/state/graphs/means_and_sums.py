"""Whether a number of a step's graph is a mean or a sum over rows: it is computed for a few, and for parts of these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from kdist._tf_internals import has_state
from kdist.state.graphs.rank_dependence import computed_of

_NUM_ROWS, _NUM_FIRST = 6, 2  # few, as a row may be large; even, as a step may halve them
_MAX_BYTES = 2**26  # of what a tensor of twice the rows takes
_UNKNOWN_SIZE = 4  # of a dimension that the graph does not know
_RANGES: tuple[tuple[float, float, int], ...] = (  # of made-up numbers, and of integers
    (-1.0, 1.0, 2),
    (0.1, 0.9, 2),  # which have a logarithm
    (0.0, 1.0, 10),
)
_FIXED = 0.7  # of what is taken to be known
_CHOOSING = ("Where", "Unique", "DynamicPartition", "ListDiff", "NonMaxSuppression", "StringSplit")
_LINEAR = (  # in what has no rows any more
    *("Sum", "Mean", "Add", "AddV2", "AddN", "Sub", "Neg", "Identity", "IdentityN", "Cast"),
    *("Pack", "Reshape", "Squeeze", "ExpandDims", "ConcatV2", "Transpose"),
)
_MOVED_BY = 0.07  # of weights
_HALVES = (tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum)
_HARMLESS = (  # of those with a state
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Assert", "Empty"),
    *("CheckNumerics", "CheckNumericsV2"),
)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case")
_DRAWN = {  # what is drawn at random is the same for each row
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"), 0.95),
    **dict.fromkeys(("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"), 0.3),
    **dict.fromkeys(("TruncatedNormal", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"), 0.3),
}

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
        self._is_sending = ComputedFrom(acts)
        self._is_chosen = ComputedFrom(lambda operation: operation.type.startswith(_CHOOSING))
        self._are_numbers: dict[tuple[Any, str], bool] = {}
        self._lengths = {leaves[place].shape[0] for place in with_rows if self._can_be_made_up(place)}
        self.length = next(iter(self._lengths), None)

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
        known = [each for each in fixed if tf.is_symbolic_tensor(each) and each.shape.is_fully_defined()]
        found: set[Kind] = set()
        with contextlib.suppress(Exception), tf.init_scope():  # a check must not end a training
            for are_moved in (False, True):  # a number may be 0 with the first weights
                function, tolerance = _function_of(
                    value, self.leaves, known, self.length, self._is_of_message, are_moved=are_moved
                )
                for bounds in _RANGES:
                    if found <= {"sum"}:  # which other rows may show to be none
                        found |= self._kinds(function, bounds, tolerance)
                if found:
                    break
        if found == {"sum"} and self.length is None and self.relates_rows(value, known):
            return "other"
        return found.pop() if len(found) == 1 else "other" if found else None

    def _kinds(
        self, function: Callable[..., tf.Tensor], bounds: tuple[float, float, int], tolerance: float
    ) -> set[Kind]:
        """Returns what a value is for made-up rows, nothing if that is not known."""
        try:
            kind = _kind(self._computed(function, bounds), tolerance)
        except (tf.errors.OpError, ValueError, ArithmeticError):  # as of integers that no table has
            return set()
        return set() if kind is None else {kind}

    def relates_rows(self, value: tf.Tensor, fixed: Sequence[tf.Tensor]) -> bool:
        """Returns whether a mean or a sum is of more than a number for each row, as of what is divided by a sum.

        A tensor of known shape has no rows any more. It may be added up, and may not be used otherwise. The number of
        all rows may.

        Args:
            value: symbolic tensor.
            fixed: sequence of tensors that do not count as computed from rows.
        """
        free = RowFree(fixed, self.depends_on_rows)
        for operation in free.followed([value]):
            if operation.type == "Mean" and _is_without_rows(operation.outputs[0]) and self._takes_chosen(operation):
                return True
            if operation.type in _LINEAR:
                continue
            inputs = [each for each in operation.inputs if not free(each)]
            related = [each for each in inputs if _is_without_rows(each) and not self.is_number_of_rows(each)]
            has_rows = any(not each.shape.is_fully_defined() for each in inputs)
            is_scaled = (
                len(related) == 1
                and not has_rows
                and (
                    operation.type == "Mul"
                    or (operation.type in ("Div", "RealDiv") and operation.inputs[0].name == related[0].name)
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

    def _computed(self, function: Callable[..., tf.Tensor], bounds: tuple[float, float, int]) -> list[np.ndarray]:
        """Returns a value for some rows, for these twice, for the first of them, and for the others."""
        generator = np.random.default_rng(0)
        rows = [self._made_up(place, generator, bounds) for place in range(len(self.leaves))]

        def run(chosen: Sequence[int]) -> np.ndarray:
            data = [each[chosen] if place in self._with_rows else each for place, each in enumerate(rows)]
            return np.asarray(function(*map(tf.constant, data)), np.float64)

        order = list(range(_NUM_ROWS))
        return [run(each) for each in (order, order * 2, order[:_NUM_FIRST], order[_NUM_FIRST:])]

    def _made_up(self, place: int, generator: np.random.Generator, bounds: tuple[float, float, int]) -> np.ndarray:
        leaf = self.leaves[place]
        shape = [_UNKNOWN_SIZE if size is None else size for size in leaf.shape]
        if place in self._with_rows:
            shape[0] = _NUM_ROWS
        if leaf.dtype == tf.string:
            return np.full(shape, b"a", object)
        if not leaf.dtype.is_floating:
            return generator.integers(0, bounds[2], shape).astype(leaf.dtype.as_numpy_dtype)
        if bounds[2] > 2:  # whole numbers, as of masks
            return generator.integers(0, 2, shape).astype(leaf.dtype.as_numpy_dtype)
        return generator.uniform(*bounds[:2], shape).astype(leaf.dtype.as_numpy_dtype)


class ComputedFrom:
    """Finds which operations of graphs are of some kind, or computed from one that is.

    Args:
        is_origin: callable that takes an operation and returns whether it is of that kind.
    """

    def __init__(self, is_origin: Callable[[tf.Operation], bool]) -> None:
        self._is_origin = is_origin
        self._found: dict[Any, tuple[set[str], int]] = {}

    def __call__(self, operation: tf.Operation) -> bool:
        """Returns whether an operation is of that kind, or computed from one."""
        graph = operation.graph
        names, start = self._found.get(graph, (set(), 0))
        operations = graph.get_operations()
        for each in operations[start:]:
            if self._is_origin(each) or any(part.op.name in names for part in each.inputs):
                names.add(each.name)
        self._found[graph] = names, len(operations)
        return operation.name in names


class RowFree:
    """Finds which tensors of a graph are not computed from rows, where some that are count as known.

    Args:
        known: sequence of tensors.
        depends_on_rows: callable that takes a tensor and returns whether it is computed from rows.
    """

    def __init__(self, known: Sequence[tf.Tensor], depends_on_rows: Callable[[tf.Tensor], bool]) -> None:
        self._known = {each.name for each in known if tf.is_symbolic_tensor(each)}  # and what is computed from them
        self.depends_on_rows = depends_on_rows

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, of which the operations are followed, is not computed from rows."""
        return tensor.name in self._known or not self.depends_on_rows(tensor)

    def followed(
        self, tensors: Sequence[tf.Tensor], is_end: Callable[[tf.Tensor], bool] = lambda _: False
    ) -> Iterator[tf.Operation]:
        """Yields the operations that compute tensors from rows, in the order of the graph.

        Args:
            tensors: sequence of tensors of one graph.
            is_end: callable that takes a tensor and returns whether what computes it is left out.
        """
        names = {each.op.name for each in computed_of(tensors, lambda each: self(each) or is_end(each))}
        for operation in tensors[0].graph.get_operations():
            if operation.name not in names:
                continue
            is_of_rows = [not self(each) for each in operation.inputs]
            if any(is_of_rows) or not any(each.name in self._known for each in operation.inputs):
                yield operation
            else:
                self._known |= {each.name for each in operation.outputs}


def _is_without_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.is_fully_defined() and (tensor.dtype.is_floating or tensor.dtype.is_bool)


def _kind(found: list[np.ndarray], tolerance: float) -> Kind | None:
    """Returns what a value is; see `MeansAndSums._computed`."""
    if found[0].shape != found[1].shape:  # an element for each row
        found = [np.sum(each) for each in found]
    once, twice, first, others = found
    size = max(np.linalg.norm(np.ravel(each)) for each in found)
    if not np.isfinite(size) or np.linalg.norm(np.ravel(once)) <= 10 * tolerance * size:
        return None

    def equal(one: np.ndarray, other: np.ndarray) -> bool:
        return bool(np.linalg.norm(np.ravel(one - other)) <= tolerance * size)

    if equal(twice, once) and equal((_NUM_FIRST * first + (_NUM_ROWS - _NUM_FIRST) * others) / _NUM_ROWS, once):
        return "mean"
    return "sum" if equal(twice, 2 * once) and equal(first + others, once) else "other"


def _function_of(
    value: tf.Tensor,
    leaves: Sequence[tf.Tensor],
    fixed: Sequence[tf.Tensor],
    length: int | None,
    is_known: Callable[[tf.Operation], bool],
    *,
    are_moved: bool,
) -> tuple[Callable[..., tf.Tensor], float]:
    """Returns a function of the leaves that computes a tensor of a graph, and how exact it is; see `_move_weights`.

    Raises:
        LookupError: if what it is computed by cannot run by itself.
    """
    graph: Any = value.graph
    outer = {inner.name: each for each, inner in graph.captures}
    captures = {id(each): inner.name for each, inner in graph.captures}
    # One of the outer graph, as where XLA compiles a part of the step, may not have been captured.
    names, names_of_fixed = (
        [each.name if each.graph is graph else captures.get(id(each)) for each in tensors]
        for tensors in (leaves, fixed)
    )
    known = {name for name in (*names, *names_of_fixed) if name is not None}
    graph_def, captured = _sub_graph(value, known, outer, length, is_known)
    if length is not None and any(_may_hold(node, length) for node in graph_def.node if node.op == "Const"):
        raise LookupError(length)
    if are_moved:
        _move_weights(graph_def)

    def compute(*data: tf.Tensor) -> tf.Tensor:
        inputs = {
            name: tf.cast(tf.fill(each.shape, _FIXED), each.dtype)
            for name, each in zip(names_of_fixed, fixed, strict=True)
        }
        inputs |= dict(zip(names, data, strict=True))
        here: Any = tf.compat.v1.get_default_graph()
        inputs |= {name: here.capture(outer[name]) for name in captured}
        used = {name: each for name, each in inputs.items() if name in graph_def_inputs}
        return tf.graph_util.import_graph_def(graph_def, used, [value.name], name="rows")[0]

    graph_def_inputs = {f"{name}:0" if ":" not in name else name for node in graph_def.node for name in node.input}
    specs = [tf.TensorSpec([None, *each.shape[1:]] if each.shape.rank else each.shape, each.dtype) for each in leaves]
    is_rounded = any(attribute.type in _HALVES for node in graph_def.node for attribute in node.attr.values())
    return tf.function(compute, input_signature=specs, autograph=False), 0.02 if is_rounded else 1e-3


def _sub_graph(
    value: tf.Tensor,
    known: Collection[str],
    outer: dict[str, Any],
    length: int | None,
    is_known: Callable[[tf.Operation], bool],
) -> tuple[tf.compat.v1.GraphDef, list[str]]:
    """Returns the part of a graph that computes a tensor, and the names of what it has captured.

    Raises:
        LookupError: if an operation of it writes, sends or draws, is large, or what it has captured is not known.
    """
    found, captured = tf.compat.v1.GraphDef(), []
    called = []
    pending, seen = [value.op], set()
    while pending:
        operation = pending.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type == "Placeholder":
            name = operation.outputs[0].name
            if name not in outer or tf.is_symbolic_tensor(outer[name]):
                raise LookupError(name)
            captured.append(name)
            continue
        found.node.append(node_of(operation))
        node, inputs = found.node[-1], list(operation.inputs)
        if operation.type in _DRAWN and operation.outputs[0].dtype.is_floating:
            inputs = inputs[:1]
            _make_constant(found, node, operation)
        elif is_known(operation):
            inputs = []
            _make_constants(found, node, operation)
        elif acts(operation):
            raise LookupError(operation.type)
        if any(_is_large(each, length) for each in operation.outputs):
            raise LookupError(operation.name)
        if any(each.HasField("func") or each.list.func for each in node.attr.values()):
            called.append(operation)
        pending += [each.op for each in inputs if each.name not in known]
    if called:
        found.library.CopyFrom(value.graph.as_graph_def().library)
        _check_functions(called, found.library)
    return found, captured


def _move_weights(graph_def: tf.compat.v1.GraphDef) -> None:
    """Adds a number to each variable where it is read."""
    for node in [each for each in graph_def.node if each.op == "ReadVariableOp"]:
        dtype = tf.as_dtype(node.attr["dtype"].type)
        if not dtype.is_floating:
            continue
        moved = graph_def.node.add(name=node.name, op="AddV2", input=[f"{node.name}/kept", f"{node.name}/by"])
        moved.attr["T"].type = dtype.as_datatype_enum
        number = graph_def.node.add(name=f"{node.name}/by", op="Const")
        number.attr["dtype"].type = dtype.as_datatype_enum
        number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_MOVED_BY, dtype, ()))
        node.name = f"{node.name}/kept"


def _may_hold(constant: Any, length: int) -> bool:
    """Returns whether a constant of a graph may come from a number of rows, as what a sum is divided by."""
    value = tf.make_ndarray(constant.attr["value"].tensor)
    if not (value.size and np.issubdtype(value.dtype, np.number)):
        return False
    first = float(value.flat[0])
    parts = (first / length, 1 / (first * length)) if first else ()
    return value.shape[:1] == (length,) or any(abs(each) >= 1 and each.is_integer() for each in parts)


def _make_constant(graph_def: tf.compat.v1.GraphDef, node: Any, operation: tf.Operation) -> None:
    """Makes a node that draws numbers of a given shape one that fills it with one number."""
    dtype, shape = operation.outputs[0].dtype, operation.inputs[0].dtype
    number = graph_def.node.add(name=f"{node.name}/drawn", op="Const")
    number.attr["dtype"].type = dtype.as_datatype_enum
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_DRAWN[operation.type], dtype, ()))
    node.op = "Fill"
    del node.input[1:]
    node.input.append(number.name)
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype.as_datatype_enum, shape.as_datatype_enum


def _make_constants(graph_def: tf.compat.v1.GraphDef, node: Any, operation: tf.Operation) -> None:
    """Makes a node one of constants of the same shapes."""
    node.op = "IdentityN"
    node.attr.clear()
    node.attr["T"].list.type.extend(each.dtype.as_datatype_enum for each in operation.outputs)
    del node.input[:]
    for place, each in enumerate(operation.outputs):
        number = graph_def.node.add(name=f"{node.name}/{place}", op="Const")
        number.attr["dtype"].type = each.dtype.as_datatype_enum
        number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_FIXED, each.dtype, each.shape))
        node.input.append(number.name)


def _check_functions(called: Sequence[tf.Operation], library: Any) -> None:
    functions = {each.signature.name: each for each in library.function}
    pending = [name for operation in called for name in _names_of_functions(operation.node_def)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in functions[name].node_def:
            if _acts(node.op, is_stateful=has_state(node.op)) or _draws(node.op):
                raise LookupError(node.op)
            pending += _names_of_functions(node)


def node_of(operation: tf.Operation) -> Any:
    """Returns an operation's definition, for another place."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    node.device = ""
    if "_class" in node.attr:
        del node.attr["_class"]  # to be on the device of an operation that is not there
    del node.input[len(operation.inputs) :]  # those from control dependencies
    return node


def acts(operation: tf.Operation) -> bool:
    """Returns whether an operation may do more than to compute, or draws at random."""
    return _acts(operation.type, is_stateful=operation.op_def.is_stateful) or _draws(operation.type)


def _acts(kind: str, *, is_stateful: bool) -> bool:
    """Returns whether a kind of operation may do more than to compute: write, print, send, wait."""
    return is_stateful and kind not in (*_HARMLESS, *_CALLS)


def _draws(kind: str) -> bool:
    """Returns whether a kind of operation draws at random, with a state or from a seed that it is given."""
    return kind not in _CALLS and any(
        part in kind for part in ("Random", "Stateless", "Multinomial", "Shuffle", "Normal")
    )


def _is_large(tensor: tf.Tensor, length: int | None) -> bool:
    """Returns whether a tensor that has rows is large for twice the made-up rows."""
    shape = tensor.shape.as_list() if tensor.shape.rank else [0]
    sizes = [_UNKNOWN_SIZE if size is None else size for size in shape[1:]]
    return shape[0] in (None, length) and 2 * _NUM_ROWS * tensor.dtype.size * int(np.prod(sizes)) > _MAX_BYTES


def _names_of_functions(node: Any) -> list[str]:
    single = [each.func.name for each in node.attr.values() if each.HasField("func")]
    return single + [each.name for listed in node.attr.values() for each in listed.list.func]
