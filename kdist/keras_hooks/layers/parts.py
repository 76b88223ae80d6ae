"""A variable of which this rank holds a part."""

from __future__ import annotations

from typing import Any, NoReturn

import keras

from kdist.errors import StrategyError


class PartVariable(keras.Variable):  # type: ignore[misc]  # Keras has no types
    """A variable that has other values on each rank; files of TensorFlow would have those of one."""

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
