"""What a step computes from means and sums that are known, as from gradients, of which it can be computed again."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.graphs.recomputed import RowReduction
from kdist.state.rows.frontier import Frontier

_ADDS = ("Add", "AddV2", "AddN", "Sub", "Neg", "Identity", "IdentityN", "Cast")
_QUOTIENTS = ("Div", "RealDiv", "DivNoNan")
_MAX_CHANGED = 20000  # a network may have many gradients


class ReductionFrontier(Frontier):
    """The known means and sums on all ways to some tensors, which are computed from nothing else of a rank's rows.

    Args:
        values: sequence of symbolic tensors of one graph.
        known: mapping of means and sums by the keys of their tensors.
        depends_on_rows: callable that takes a tensor and returns whether it is computed from rows.

    Raises:
        LookupError: if they are computed from something else, or by what cannot be computed again.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        known: Mapping[Any, RowReduction],
        depends_on_rows: Callable[[tf.Tensor], bool],
    ) -> None:
        super().__init__()
        self._follow(
            values, lambda each: not depends_on_rows(each), lambda each: known.get(tensor_key(each)), _MAX_CHANGED
        )
        if not self.listed:
            raise LookupError(values[0].name)


def is_computed_of(value: tf.Tensor, keys: Container[Any]) -> bool:
    """Returns whether a tensor is one of those of some keys, or is computed from one."""
    return any(tensor_key(each) in keys for each in computed_of([value]))


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

    def is_end(tensor: Any) -> bool:
        return not (tf.is_symbolic_tensor(tensor) and depends_on_rows(tensor)) or is_known(tensor)

    def adds(operation: tf.Operation) -> bool:
        of_rows = [each for each in operation.inputs if depends_on_rows(each)]
        is_scaled = len(of_rows) == 1 and (
            operation.type == "Mul" or (operation.type in _QUOTIENTS and operation.inputs[0] is of_rows[0])
        )
        return is_scaled or (operation.type in _ADDS and (may_add_others or len(of_rows) == len(operation.inputs)))

    start = source(value)
    return is_end(start) or all(adds(each.op) for each in computed_of([start], is_end, source))
