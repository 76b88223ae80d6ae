"""How a number of a step's graph is made of the rank's rows: their sum, their mean, or neither."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np
import tensorflow as tf

Kind = Literal["constant", "rows", "some", "shares", "count", "sum", "mean", "divided", "other", "unknown"]
"""What a tensor is:

- `"constant"`: computed from no row
- `"rows"`: a value for each row; `"some"`, for rows that were chosen; `"shares"`, over the number of rows
- `"count"`: the number of rows, times a constant
- `"sum"`, `"mean"`: of the rows
- `"divided"`: a sum over a constant, which may be the number of rows
- `"other"`: known to be none of these
- `"unknown"`
"""

_COPIES = ("Identity", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "Cast", "Neg")
_SHAPINGS = ("Reshape", "Squeeze", "ExpandDims")
_SUMS = ("AddV2", "Add", "AddN", "Sub", "Pack")
_DIVISIONS = ("RealDiv", "DivNoNan", "Div")
_NOT_LINEAR = (
    *("Abs", "Exp", "Log", "Log1p", "Maximum", "Minimum", "Mul", "Pow", "Reciprocal", "Relu", "Rsqrt", "Sigmoid"),
    *("Softplus", "Sqrt", "Square", "SquaredDifference", "Tanh", *_DIVISIONS),
)
_OF_EACH_ROW = (  # elementwise, or along the last axis
    *(*_NOT_LINEAR, "Elu", "Erf", "LogSoftmax", "Select", "SelectV2", "Selu", "Sign", "Softmax"),
    *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod")
_LENGTHS = ("Shape", "Size")
_OF_LENGTHS = ("Prod", "StridedSlice", "Pack", "ConcatV2", "Mul", "Squeeze", "Reshape", *_COPIES)


class RowSums:
    """Follows a number back to the rows that it is computed from, through a few operations near it.

    What the operations before these do, as those of a network, is taken to be done with each row by itself.

    Args:
        depends_on_rows: callable that takes a tensor of the graph.
        lengths: collection of int, the numbers of rows that are constants of the graph.
    """

    def __init__(self, depends_on_rows: Callable[[tf.Tensor], bool], lengths: Collection[int]) -> None:
        self._depends_on_rows = depends_on_rows
        self._lengths = lengths
        self._known: dict[Any, Kind] = {}

    def note(self, value: Any, kind: Kind) -> None:
        """Says what a tensor is."""
        if tf.is_symbolic_tensor(value):
            self._known[_key(value)] = kind

    def kind_of(self, value: Any) -> Kind:
        """Returns what a tensor is; in eager steps nothing is known."""
        if tf.executing_eagerly():
            return "unknown"
        if not tf.is_symbolic_tensor(value):
            return "constant"
        key = _key(value)
        if key not in self._known:
            self._known[key] = "unknown"  # where a loop leads back here
            self._known[key] = self._found(value)
        return self._known[key]

    def _found(self, value: tf.Tensor) -> Kind:
        operation, inputs = value.op, list(value.op.inputs)
        kind = operation.type
        if not self._depends_on_rows(value):
            return "constant"
        if self._is_length(value):
            return "count"
        if kind == "IdentityN":  # of custom gradients: results, then arguments
            return self.kind_of(inputs[value.value_index])
        if kind in _COPIES or (kind in _SHAPINGS and self._keeps_rows(value, inputs[0])):
            return self.kind_of(inputs[0])
        if kind in _REDUCTIONS:
            return self._reduced(value, inputs)
        if kind == "L2Loss":
            return self._total(self.kind_of(inputs[0]))
        if kind == "MatMul" and all(map(self._depends_on_rows, inputs)):  # it pairs rows, or adds their products
            return "other" if self._has_rows(value) else "sum"
        if kind in ("Softmax", "LogSoftmax") and value.shape.rank == 1:  # over the rows
            return "other"
        if kind == "Transpose":
            return "unknown"
        if kind == "GatherV2" and self._has_rows(value):
            return "some" if _is_chosen(inputs[1]) else "rows"
        if kind not in (*_SUMS, *_OF_EACH_ROW):
            return "rows" if self._has_rows(value) else "unknown"
        if kind in ("Select", "SelectV2"):
            condition, *inputs = inputs
            if self._depends_on_rows(condition) and not self._has_rows(condition):
                return "other"
            if self._depends_on_rows(condition) and not any(map(self._depends_on_rows, inputs)):
                return "rows"
        kinds = [self.kind_of(each) for each in inputs]
        if kind in _DIVISIONS or kind == "Mul":
            found = self._scaled(kind, inputs, kinds)
            if found is not None:
                return found
        if {"rows", "some", "shares"} & set(kinds):
            return _of_rows(set(kinds)) if kind != "Pack" else "unknown"
        if kind in _SUMS:
            return self._added(inputs, kinds)
        return "other" if set(kinds) <= {"constant", "count", "sum", "mean", "divided", "other"} else "unknown"

    def _scaled(self, operation: str, inputs: list[tf.Tensor], kinds: list[Kind]) -> Kind | None:
        """Returns what a product or a quotient is in which one operand is a constant or counts rows."""
        one, other = kinds
        if operation == "Mul":
            if "constant" not in kinds:
                return None
            found, factor = (other, inputs[0]) if one == "constant" else (one, inputs[1])
            return "divided" if found == "sum" and _is_part(factor) else found
        if other == "constant":
            return self._divided_by(inputs[1]) if one == "sum" else one
        if other == "count":
            return {"sum": "mean", "rows": "shares", "some": "unknown"}.get(one, "other")  # type: ignore[return-value]
        return None

    def _divided_by(self, divisor: tf.Tensor) -> Kind:
        value = tf.get_static_value(divisor)
        if value is None:
            return "divided"
        if (np.abs(value) < 3).all():  # as a half
            return "sum"
        return "mean" if any((np.asarray(value) % each == 0).all() for each in self._lengths) else "divided"

    def _reduced(self, value: tf.Tensor, inputs: list[tf.Tensor]) -> Kind:
        values, axes, operation = inputs[0], tf.get_static_value(inputs[1]), value.op.type
        kind = self.kind_of(values)
        if kind not in ("rows", "some", "shares"):  # but made of the rows already
            return kind if operation in ("Sum", "Mean") or kind in ("constant", "unknown") else "other"
        if axes is None or values.shape.rank is None:
            return "unknown"
        if 0 not in {int(axis) % values.shape.rank for axis in np.ravel(axes)}:
            return kind
        if self._has_rows(value):  # the first axis may be that of time
            return "unknown"
        if operation == "Sum":
            return self._total(kind)
        if operation != "Mean":
            return "other"
        return {"rows": "mean", "some": "other"}.get(kind, "unknown")  # type: ignore[return-value]

    def _total(self, kind: Kind) -> Kind:
        return {"rows": "sum", "some": "sum", "shares": "mean"}.get(kind, "other")  # type: ignore[return-value]

    def _added(self, inputs: list[tf.Tensor], kinds: list[Kind]) -> Kind:
        found = {kind for kind, each in zip(kinds, inputs, strict=True) if not _is_zero(each)}
        if found == {"constant", "mean"}:
            return "mean"
        if len(found) == 1:
            return found.pop()
        return "unknown" if "unknown" in found else "other"

    def _has_rows(self, value: tf.Tensor) -> bool:
        return bool(value.shape.rank) and (value.shape[0] is None or value.shape[0] in self._lengths)

    def _keeps_rows(self, new: tf.Tensor, old: tf.Tensor) -> bool:
        return self._has_rows(new) or not self._has_rows(old)

    def _is_length(self, value: tf.Tensor) -> bool:
        """Returns whether a scalar is computed from lengths alone."""
        if value.shape.rank != 0 or value.op.type not in _OF_LENGTHS:
            return False
        pending, any_length = [value], False
        while pending:
            operation = pending.pop().op
            if operation.type in _LENGTHS:
                any_length = True
            elif operation.type in _OF_LENGTHS:
                pending += operation.inputs
            elif operation.type != "Const":
                return False
        return any_length


def _of_rows(kinds: set[Kind]) -> Kind:
    """Returns what is computed element by element from tensors of some kinds."""
    if kinds & {"other", "sum", "mean", "divided"}:
        return "other"
    if "unknown" in kinds or kinds & {"count", "shares"}:
        return "unknown"
    return "some" if "some" in kinds else "rows"


def _is_part(factor: tf.Tensor) -> bool:
    """Returns whether a factor is one over a power of two from 4 on, as that of a batch."""
    value = np.ravel(np.asarray(tf.get_static_value(factor), object))
    if value.size != 1 or not isinstance(value[0], (float, np.floating)) or not value[0]:
        return False
    mantissa, exponent = np.frexp(abs(float(value[0])))
    return bool(mantissa == 0.5 and exponent <= -1)


def _is_zero(value: tf.Tensor) -> bool:
    known = tf.get_static_value(value)
    return known is not None and not np.any(known)


def _is_chosen(indices: tf.Tensor) -> bool:
    """Returns whether indices are those of a condition, as in `tf.boolean_mask`."""
    while indices.op.type in ("Squeeze", "Reshape", "Identity", "Cast", "StridedSlice"):
        indices = indices.op.inputs[0]
    return indices.op.type == "Where"


def _key(value: tf.Tensor) -> Any:
    return value.graph, value.name
