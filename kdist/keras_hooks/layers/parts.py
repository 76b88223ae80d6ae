"""A variable of which this rank holds a part, and what knows the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import keras

from kdist.engines.engine import Engine
from kdist.errors import StrategyError


class Holder(Protocol):
    """Variables of which each rank has its part: a table and its slots, or the slots of parts of weights.

    Attributes:
        engine: `Engine`, of all ranks.
    """

    engine: Engine

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of a whole variable. Collective: every rank must call this, in the same order."""
        ...

    def whole(self, variable: Any) -> Any:
        """Returns a whole variable, an array. Collective: every rank must call this, in the same order."""
        ...

    def blocks(self, variable: Any, receivers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yields blocks of a whole variable: the first row's index, and an array, empty on ranks that get none.

        Collective: every rank must iterate over this, in the same order.
        """
        ...

    def assign(self, variable: Any, array: Any) -> None:
        """Sets a variable to this rank's part of a whole one: an array, an open HDF5 dataset or a `DeferredArray`.

        Collective, if it is deferred: every rank must call this, in the same order.
        """
        ...


class PartVariable(keras.Variable):  # type: ignore[misc]  # Keras has no types
    """A variable that has other values on each rank; files of TensorFlow would have those of one."""

    kdist_holder: Holder

    def _refuse_file(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StrategyError(
            "tf.train.Checkpoint and tf.saved_model.save do not support state in parts: each rank holds its part of "
            f"this variable. Received: {self.path!r}, to write or to read. Expected a file for which the ranks gather "
            "the parts. Fix: model.save(...) on all ranks, kdist.callbacks.BackupAndRestore to resume, or "
            "model.export(...) to serve."
        )

    _serialize_to_tensors = _restore_from_tensors = _export_to_saved_model_graph = _refuse_file

    def __repr__(self) -> str:
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, in parts>"


def holder_of(variable: Any) -> Holder | None:
    """Returns the `Holder` of a variable in parts; `None` of any other variable."""
    return variable.kdist_holder if isinstance(variable, PartVariable) else None
