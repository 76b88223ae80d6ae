"""What the graph of a step shows of the rows from which the step computes its losses, metrics and logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist._tf_internals import is_compiled_by_xla
from kdist.data.batch import Rows
from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.rows.means_and_sums import MeansAndSums
from kdist.state.rows.row_wise import RowWise
from kdist.strategies.open_step import OpenStep

Means = dict[Any, tf.Tensor]
"""Tensors that count as means over the rank's rows, by graph and name."""


class StepRows:
    """Knows the data of a step, and the tensors that do not count as computed from its rows.

    Args:
        step: the open step.

    Attributes:
        means: dict, tensors that count as means over the rank's rows.
    """

    def __init__(self, step: OpenStep) -> None:
        self._step = step
        self.means: Means = {}
        self._statistics: list[tf.Tensor] = []
        self._of_data: MeansAndSums | None = None
        self._row_wise: RowWise | None = None
        self._computed_again: set[str] = set()  # names of operations

    def note_mean(self, value: Any) -> None:
        """Says that a loss counts as a mean over the rank's rows, whatever it is computed by."""
        if tf.is_symbolic_tensor(value):
            self.means[tensor_key(value)] = value

    def note_statistics(self, moments: Sequence[tf.Tensor]) -> None:
        """Says by which statistics a layer normalizes; the log names those that are a rank's own."""
        self._statistics += [each for each in moments if tf.is_symbolic_tensor(each)]

    def known(self) -> list[tf.Tensor]:
        """Returns what does not count as computed from rows, though it is."""
        return [self._step.weight, self._step.share, *self._statistics]

    def is_of_rows(self, value: Any) -> bool:
        """Returns whether a value is a tensor of the graph that is being traced, and is computed from rows."""
        is_own = isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value) and value.graph is _graph()
        return is_own and self._step.depends_on_rows(value)

    def of(self, value: tf.Tensor) -> MeansAndSums | None:
        """Returns the rows of which a tensor is computed, if others can be made up for them.

        The step is traced again, where its graph hides something.
        """
        found = self.at_hand(value)
        if found is None or self._step.is_traced_again(knows_number=found.length is not None):
            return None
        return found

    def row_wise(self, value: tf.Tensor) -> RowWise | None:
        """Returns what finds the tensors before one that hold a row for each of the data.

        It is `None` in a branch, with XLA, and where the graph knows the number of rows.
        """
        found = None if self.is_in_branch(value) else self.at_hand(value)
        if found is None or found.length is not None:
            return None
        self._row_wise = self._row_wise or RowWise(found)
        return self._row_wise

    def at_hand(self, value: tf.Tensor) -> MeansAndSums | None:
        """See `of`; the step is not traced again for this."""
        found = self._of_data = self._of_data or self._means_and_sums()
        return found if found.can_tell(value) else None

    @contextlib.contextmanager
    def computing_again(self) -> Iterator[None]:
        """A context in which what the step has computed is computed again from the rows of all ranks."""
        graph = _graph()
        start = len(graph.get_operations())
        try:
            yield
        finally:
            self._computed_again |= {each.name for each in graph.get_operations()[start:]}

    def is_computed_again(self, value: tf.Tensor, means: Means) -> bool:
        """Returns whether a number is computed from what was computed again, which no tape has recorded."""
        before = computed_of([value], lambda each: tensor_key(each) in means)
        return any(each.op.name in self._computed_again for each in before)

    def is_in_branch(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is in another graph than the data, or one that XLA compiles, or of no known rows."""
        found = self.at_hand(value)
        if found is None or is_compiled_by_xla():
            return True
        return not all(each is value.graph for each in (*(x.graph for x in found.leaves), _graph()))

    def is_in_vectorized_loop(self, value: Any) -> bool:
        """Returns whether a tensor is computed from the counter of a loop that becomes operations on all its turns.

        So loop `tf.vectorized_map`, and `jacobian` and `batch_jacobian` of tapes, in the graph of the step itself.
        """
        if not tf.is_symbolic_tensor(value) or not isinstance(value, tf.Tensor):
            return False
        return any(_is_counter(each) for each in computed_of([value]))

    def _means_and_sums(self) -> MeansAndSums:
        rows = Rows(self._step.data)
        leaves = [
            (leaf, rows.probably_has_rows(place))
            for place, leaf in enumerate(tf.nest.flatten(self._step.data))
            if leaf is not None
        ]
        with_rows = [place for place, (_, has_rows) in enumerate(leaves) if has_rows]
        known: dict[Any, bool] = {}

        def depends_on_rows(tensor: tf.Tensor) -> bool:
            key = tensor_key(tensor)
            if key not in known:
                known[key] = self._step.depends_on_rows(tensor)
            return known[key]

        return MeansAndSums([leaf for leaf, _ in leaves], with_rows, depends_on_rows)


def _is_counter(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is what TensorFlow's `pfor` counts by; rows of no known number are no scalars."""
    return tensor.op.type == "PlaceholderWithDefault" and tensor.dtype == tf.int32 and tensor.shape.rank == 0


def _graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()
