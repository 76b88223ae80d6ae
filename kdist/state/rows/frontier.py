"""Where a graph is cut, to compute some of its tensors again from others of which it is known what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist.state.graphs.recomputed import RowReduction, check_repeatable


class Frontier:
    """What is known on all ways to some tensors; what comes after it can be computed again.

    Attributes:
        listed: list of `RowReduction`, what they are computed of.
        changed: set of str, the names of tensors that are computed again.
    """

    def __init__(self) -> None:
        self.listed: list[RowReduction] = []
        self.changed: set[str] = set()

    def is_changed(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed again."""
        return tensor.name in self.changed

    def _change(self, operation: tf.Operation) -> None:
        check_repeatable(operation)
        self.changed |= {each.name for each in operation.outputs}

    def _follow(
        self,
        values: Sequence[tf.Tensor],
        is_free: Callable[[tf.Tensor], bool],
        known: Callable[[tf.Tensor], RowReduction | None],
        max_changed: int,
    ) -> None:
        """Follows tensors back to what is known, or is computed from no rows.

        Raises:
            LookupError: if something on the way cannot be computed again, or it is too much.
        """
        pending, seen = list(values), set()
        while pending:
            tensor = pending.pop()
            if tensor.name in seen or is_free(tensor):
                continue
            seen.add(tensor.name)
            if (found := known(tensor)) is not None:
                self.listed.append(found)
                continue
            self._change(tensor.op)
            if len(self.changed) > max_changed:
                raise LookupError(tensor.name)
            pending += tensor.op.inputs
