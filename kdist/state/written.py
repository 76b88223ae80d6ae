"""What the steps of a model have written beside weights, and how it is merged."""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any, Literal

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.variables import key_of, path_of

logger = logging.getLogger("kdist")

Merge = Literal["sum", "mean", "first", "count"]
"""The sum of the increments; the mean by rows; rank 0's value; the sum of the increments, if a rank knows that they
count rows, else the common one."""

FIX = (
    'Fix: give the variable an `aggregation` ("sum": the ranks\' increments are summed; "mean"; "only_first_replica"), '
    "or compute the new value of the global batch with `kdist.all_gather` or `kdist.all_reduce` in the layer, or, if "
    'each rank is to keep its own value, `keras.Variable(..., synchronization="on_read")`'
)


@dataclasses.dataclass
class Written:
    """A variable that a step writes.

    Attributes:
        variable: `keras.Variable` or `tf.Variable`.
        before: tensor, its value before the step; of a variable that is summed, after the last merge.
        assignments: list of `(method, values, graph, place)`, those in a graph: the method's name, the tensors and
            numbers that it was given, the graph and how many operations it had before.
        merge: `Merge`, how an earlier step has merged it, or `None`.
        counts_rows: bool, whether this rank's graph shows that its increments depend on the rank's rows.
    """

    variable: Any
    before: tf.Tensor
    assignments: list[tuple[str, list[Any], tf.Graph, int]] = dataclasses.field(default_factory=list)
    merge: Merge | None = None
    counts_rows: bool = False


class WrittenState:
    """The variables beside weights that the steps of a model write, in the order in which they were found.

    Args:
        engine: `Engine`, of all ranks.

    Attributes:
        merges: dict by the kinds of steps of dicts, by the variables' keys, of pairs of a variable in which ranks
            differ and its `Merge`.
        variables: dict by their keys of all that are written, but not by each rank for itself.
    """

    def __init__(self, engine: Engine) -> None:
        self._warns = engine.rank == 0 and engine.size > 1
        self.merges: dict[str, dict[int, tuple[Any, Merge]]] = collections.defaultdict(dict)
        self.variables: dict[int, Any] = {}
        self._warned: set[tuple[int, str]] = set()
        self._has_warned_of_tables = False

    def warn_once(self, variable: Any, message: str) -> None:
        """Logs a warning about a variable on rank 0, once; its path is filled in."""
        key = key_of(variable), message
        if key not in self._warned and self._warns:
            logger.warning(message, path_of(variable))
        self._warned.add(key)

    def warn_of_tables_once(self) -> None:
        """Logs a warning about lookup tables on rank 0, once."""
        if not self._has_warned_of_tables and self._warns:
            logger.warning(
                "the step writes a lookup table from each rank's own rows: its contents differ between the ranks, and "
                "so does what is looked up. Fix: insert what `kdist.all_gather` returns for keys and values, or fill "
                "the table before training"
            )
        self._has_warned_of_tables = True
