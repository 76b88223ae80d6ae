"""The part of a step's graph that computes tensors, as a function of made-up rows that does nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._tf_internals import add_function, has_state, without_tracing_warnings

NUM_ROWS = 6
"""How many rows are made up: few, as a row may be large; even, as a step may halve them."""

FEW_ROWS = 4
"""How many are made up of rows that are larger than `MAX_BYTES`."""

UNKNOWN_SIZE = 4
"""The size of a dimension that the graph does not know."""

MAX_BYTES = 2**26
"""How many bytes a tensor of twice the rows may take."""

_FIXED = 0.7  # of what is taken to be known
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
_DRAWN_INTEGERS = {"RandomUniformInt": 1, "StatelessRandomUniformInt": 2, "StatelessRandomUniformIntV2": 4}
"""The places of the least integers among the inputs, which are drawn for each row."""


def function_of(
    values: Sequence[tf.Tensor],
    leaves: Sequence[tf.Tensor],
    fixed: Sequence[tf.Tensor],
    length: int | None,
    is_known: Callable[[tf.Operation], bool],
    *,
    are_moved: bool,
    max_bytes: int | None = MAX_BYTES,
) -> tuple[Any, float]:
    """Returns a `tf.function` of the leaves that computes tensors of a graph, and how exact it is; see `_move_weights`.

    Raises:
        LookupError: if what they are computed by cannot run by itself, or is large.
    """
    graph: Any = values[0].graph
    outer = {inner.name: each for each, inner in graph.captures}
    captures = {id(each): inner.name for each, inner in graph.captures}
    # One of the outer graph, as where XLA compiles a part of the step, may not have been captured.
    names, names_of_fixed = (
        [each.name if each.graph is graph else captures.get(id(each)) for each in tensors]
        for tensors in (leaves, fixed)
    )
    known = {name for name in (*names, *names_of_fixed) if name is not None}
    graph_def, captured = _sub_graph(values, known, outer, length, is_known, max_bytes)
    if length is not None and any(_may_hold(node, length) for node in graph_def.node if node.op == "Const"):
        raise LookupError(length)
    if are_moved:
        _move_weights(graph_def)

    def compute(*data: tf.Tensor) -> list[tf.Tensor]:
        inputs = {
            name: tf.cast(tf.fill(each.shape, _FIXED), each.dtype)
            for name, each in zip(names_of_fixed, fixed, strict=True)
        }
        inputs |= dict(zip(names, data, strict=True))
        here: Any = tf.compat.v1.get_default_graph()
        inputs |= {name: here.capture(outer[name]) for name in captured}
        used = {name: each for name, each in inputs.items() if name in graph_def_inputs}
        outputs = [each.name for each in values]
        return list(tf.graph_util.import_graph_def(graph_def, used, outputs, name="rows"))

    graph_def_inputs = {f"{name}:0" if ":" not in name else name for node in graph_def.node for name in node.input}
    specs = [tf.TensorSpec([None, *each.shape[1:]] if each.shape.rank else each.shape, each.dtype) for each in leaves]
    is_rounded = any(attribute.type in _HALVES for node in graph_def.node for attribute in node.attr.values())
    return without_tracing_warnings(
        tf.function(compute, input_signature=specs, autograph=False)
    ), 0.02 if is_rounded else 1e-3


def _sub_graph(
    values: Sequence[tf.Tensor],
    known: Collection[str],
    outer: dict[str, Any],
    length: int | None,
    is_known: Callable[[tf.Operation], bool],
    max_bytes: int | None,
) -> tuple[tf.compat.v1.GraphDef, list[str]]:
    """Returns the part of a graph that computes tensors, and the names of what it has captured.

    Raises:
        LookupError: if an operation of it writes, sends or draws, is large, or what it has captured is not known.
    """
    found, captured = tf.compat.v1.GraphDef(), []
    called = []
    pending, seen = [each.op for each in values], set()
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
        if is_drawn(operation):
            inputs = [inputs[place] for place in _make_constant(found.node, node)]
        elif is_known(operation):
            inputs = []
            _make_constants(found, node, operation)
        elif acts(operation):
            raise LookupError(operation.type)
        if max_bytes is not None and any(num_bytes(each, length) > max_bytes for each in operation.outputs):
            raise LookupError(operation.name)
        if calls(operation):
            called.append(operation)
        pending += [each.op for each in inputs if each.name not in known]
    if called:
        try:
            found.library.function.extend(functions_of(called))
        except LookupError:
            found.library.function.extend(functions_of(called, are_computed=True))
            _rename_functions(found, "_without_actions")
            for each in found.library.function:
                add_function(each)  # those of an earlier time are the same
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


def _make_constant(nodes: Any, node: Any, output: str = "") -> list[int]:
    """Makes one of some nodes, that draws numbers of a given shape, one that fills it with one number.

    Args:
        nodes: the nodes, to which one may be added.
        node: `NodeDef`, one of them.
        output: str, what follows a node's name where another takes what a constant returns.

    Returns:
        A list of int, the places of the inputs that it still has.
    """
    dtype = node.attr["Tout" if "Tout" in node.attr else "dtype"].type
    shape = node.attr["Tshape" if "Tshape" in node.attr else "T"].type
    kept = [0, *([_DRAWN_INTEGERS[node.op]] if node.op in _DRAWN_INTEGERS else [])]
    inputs = [node.input[place] for place in kept]
    if node.op in _DRAWN:
        number = nodes.add(name=f"{node.name}/drawn", op="Const")
        number.attr["dtype"].type = dtype
        number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_DRAWN[node.op], tf.as_dtype(dtype), ()))
        inputs.append(f"{number.name}{output}")
    node.op = "Fill"
    del node.input[:]
    node.input.extend(inputs)
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype, shape
    return kept


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


def functions_of(
    called: Sequence[tf.Operation], *, are_differentiated: bool = False, are_computed: bool = False
) -> list[Any]:
    """Returns the definitions of the functions that operations of a graph call, and of those that these call.

    Args:
        called: sequence of operations.
        are_differentiated: bool, whether a copy of them is differentiated.
        are_computed: bool, whether they only return numbers of made-up rows: see `_without_actions`.

    Raises:
        LookupError: if one of them writes, sends or draws; or, for a copy that is differentiated, if it calls one that
            is no branch and no loop, or has a gradient of its own, which is that of the original's tensors.
    """
    functions = {each.signature.name: each for each in called[0].graph.as_graph_def().library.function}
    pending = [name for operation in called for name in _names_of_functions(operation.node_def)]
    found: dict[str, Any] = {}
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = _without_actions(functions[name]) if are_computed else functions[name]
        for node in found[name].node_def:
            if node.op in functions and not are_differentiated:  # as `tf.nn.ctc_loss` calls one, in its loop
                pending.append(node.op)
            elif _acts(node.op) or _draws(node.op) or (are_differentiated and has_own_gradient(node)):
                raise LookupError(node.op)
            pending += _names_of_functions(node)
    return list(found.values())


def _without_actions(function: Any) -> Any:
    """Returns a function's definition without what it does beside its results, as to print; draws are constants."""
    nodes = {each.name: each for each in function.node_def}
    found = type(function)()
    found.CopyFrom(function)
    del found.node_def[:], found.signature.control_output[:]
    found.control_ret.clear()
    pending, seen = list(function.ret.values()), set()
    while pending:
        name = pending.pop().split(":")[0]
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        node = found.node_def.add()
        node.CopyFrom(nodes[name])
        inputs = [each for each in node.input if not each.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        if _is_drawn(node):
            inputs = [inputs[place] for place in _make_constant(found.node_def, node, ":output:0")]
        pending += inputs
    return found


def has_own_gradient(node: Any) -> bool:
    """Returns whether the gradient of a copy of an operation would not be that of what it computes from its inputs."""
    return "_gradient_op_type" in node.attr or is_call(node.op)


def is_call(kind: str) -> bool:
    """Returns whether a kind of operation calls a function, and does nothing else."""
    return kind in ("PartitionedCall", "StatefulPartitionedCall")


def imported(
    graph_def: tf.compat.v1.GraphDef, functions: Sequence[Any], inputs: dict[str, Any], outputs: list[str], name: str
) -> list[tf.Tensor]:
    """Imports a graph into the default one, with copies of the functions that it calls.

    Args:
        graph_def: the graph, without a library.
        functions: sequence of `FunctionDef`, those that it calls, and those that they call.
        inputs: mapping of the names of tensors of the graph to what takes their place.
        outputs: list of str, the names of the tensors that are returned.
        name: str, a prefix of the names.
    """
    graph_def.library.function.extend(functions)
    _rename_functions(graph_def, f"_{uuid.uuid4().hex}")  # each is differentiated by itself
    for each in graph_def.library.function:
        add_function(each)  # the import alone lets none of them be called
    with tf.control_dependencies(None):  # of which the import takes none
        return list(tf.graph_util.import_graph_def(graph_def, inputs, outputs, name=name))


def _rename_functions(graph_def: tf.compat.v1.GraphDef, suffix: str) -> None:
    """Gives the functions of a graph's definition other names, where they are called, too."""
    nodes = [*graph_def.node, *(node for each in graph_def.library.function for node in each.node_def)]
    names = {each.signature.name for each in graph_def.library.function}
    for node in nodes:
        node.op += suffix if node.op in names else ""
    for attribute in (each for node in nodes for each in node.attr.values()):
        for function in [attribute.func] if attribute.HasField("func") else attribute.list.func:
            function.name += suffix
    for each in graph_def.library.function:
        each.signature.name += suffix


def node_of(operation: tf.Operation) -> Any:
    """Returns an operation's definition, for another place."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    node.device = ""
    if "_class" in node.attr:
        del node.attr["_class"]  # to be on the device of an operation that is not there
    del node.input[len(operation.inputs) :]  # those from control dependencies
    return node


def is_drawn(operation: tf.Operation) -> bool:
    """Returns whether an operation draws numbers at random, that count as the same for each row."""
    return _is_drawn(operation.node_def)


def _is_drawn(node: Any) -> bool:
    return node.op in _DRAWN_INTEGERS or (node.op in _DRAWN and tf.as_dtype(node.attr["dtype"].type).is_floating)


def calls(operation: tf.Operation) -> bool:
    """Returns whether an operation calls a function of its graph, as a branch or a loop does."""
    return any(each.HasField("func") or each.list.func for each in operation.node_def.attr.values())


def acts(operation: tf.Operation) -> bool:
    """Returns whether an operation may do more than to compute, or draws at random."""
    return _acts(operation.type) or _draws(operation.type)


def _acts(kind: str) -> bool:
    """Returns whether a kind of operation may do more than to compute: write, print, send, wait."""
    return has_state(kind) and kind not in (*_HARMLESS, *_CALLS)


def _draws(kind: str) -> bool:
    """Returns whether a kind of operation draws at random, with a state or from a seed that it is given."""
    return kind not in _CALLS and any(
        part in kind for part in ("Random", "Stateless", "Multinomial", "Shuffle", "Normal")
    )


def num_bytes(tensor: tf.Tensor, length: int | None) -> int:
    """Returns what a tensor takes for twice the made-up rows, if it has rows."""
    shape = tensor.shape.as_list() if tensor.shape.rank else [0]
    sizes = [UNKNOWN_SIZE if size is None else size for size in shape[1:]]
    return 2 * NUM_ROWS * tensor.dtype.size * int(np.prod(sizes)) if shape[0] in (None, length) else 0


def _names_of_functions(node: Any) -> list[str]:
    single = [each.func.name for each in node.attr.values() if each.HasField("func")]
    return single + [each.name for listed in node.attr.values() for each in listed.list.func]
