"""What a step computes from means and sums that are known, as from gradients, of which it can be computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.graphs.recomputed import RowReduction, check_repeatable

Known = Mapping[Any, tuple[tf.Tensor, Literal["mean", "sum"]]]
"""Tensors, and what they are of the rows, by the tensors' keys."""

_ADDS = ("Add", "AddV2", "AddN", "Sub", "Neg", "Identity", "IdentityN", "Cast")
_QUOTIENTS = ("Div", "RealDiv", "DivNoNan")
_MAX_CHANGED = 20000  # a network may have many gradients


class ReductionFrontier:
    """The known means and sums on all ways to some tensors, which are computed from nothing else of a rank's rows.

    Args:
        values: sequence of symbolic tensors of one graph.
        known: `Known`.
        depends_on_rows: callable that takes a tensor and returns whether it is computed from rows.

    Attributes:
        value: the first tensor.
        listed: list of `RowReduction`, what the tensors are computed of.

    Raises:
        LookupError: if they are computed from something else, or by what cannot be computed again.
    """

    def __init__(self, values: Sequence[tf.Tensor], known: Known, depends_on_rows: Callable[[tf.Tensor], bool]) -> None:
        self.value = values[0]
        self.listed: list[RowReduction] = []
        self._changed: set[str] = set()
        pending, seen = list(values), set()
        while pending:
            tensor = pending.pop()
            if tensor.name in seen or not depends_on_rows(tensor):
                continue
            seen.add(tensor.name)
            if tensor_key(tensor) in known:
                self.listed.append(RowReduction(*known[tensor_key(tensor)]))
                continue
            check_repeatable(tensor.op)
            self._changed |= {each.name for each in tensor.op.outputs}
            pending += tensor.op.inputs
            if len(self._changed) > _MAX_CHANGED:
                raise LookupError(tensor.name)
        if not self.listed:
            raise LookupError(self.value.name)

    def is_changed(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed again."""
        return tensor.name in self._changed


def is_computed_of(value: tf.Tensor, known: Known) -> bool:
    """Returns whether a tensor is one of those that are known, or is computed from one."""
    return any(tensor_key(each) in known for each in computed_of([value]))


def is_weighted_sum(
    value: Any,
    is_known: Callable[[tf.Tensor], bool],
    depends_on_rows: Callable[[tf.Tensor], bool],
    source: Callable[[Any], Any] = lambda tensor: tensor,
    *,
    may_add_others: bool = True,
) -> bool:
    """Returns whether a value is a weighted sum of tensors that are known, and of what is equal on all ranks.

    Args:
        value: tensor or number.
        is_known: callable that takes a tensor and returns whether it is known.
        depends_on_rows: callable that takes a tensor and returns whether it is computed from rows.
        source: callable that takes a tensor, and returns that which a function has captured as this one.
        may_add_others: bool, whether what is equal on all ranks may be added: not to terms, which are summed.
    """
    pending, seen = [value], set()
    while pending:
        tensor = source(pending.pop())
        if not tf.is_symbolic_tensor(tensor) or tensor_key(tensor) in seen:
            continue
        seen.add(tensor_key(tensor))
        if not depends_on_rows(tensor) or is_known(tensor):
            continue
        operation = tensor.op
        of_rows = [each for each in operation.inputs if depends_on_rows(each)]
        is_scaled = len(of_rows) == 1 and (
            operation.type == "Mul" or (operation.type in _QUOTIENTS and operation.inputs[0] is of_rows[0])
        )
        is_sum = operation.type in _ADDS and (may_add_others or len(of_rows) == len(operation.inputs))
        if not (is_scaled or is_sum):
            return False
        pending += of_rows
    return True
