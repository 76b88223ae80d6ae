"""What Keras' callbacks remember from step to step: taken out of them, and put back into new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdist.training.file_writers import labels

REMEMBERED = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
"""What is kept of which class, and of classes of the user's that derive from it."""


def take(callbacks: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what callbacks remember.

    Returns:
        A tuple `(values, arrays)`: by label and attribute what JSON can write, and arrays by name.
    """
    values: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    for label, callback in zip(labels(list(callbacks)), callbacks, strict=True):
        for name in _names(callback):
            value = getattr(callback, name)
            if isinstance(value, list) and value and all(isinstance(each, np.ndarray) for each in value):
                arrays.update({f"callback/{label}/{name}/{place}": _plain(each) for place, each in enumerate(value)})
            else:
                values.setdefault(label, {})[name] = plain(value)
    return values, arrays


def give(callbacks: Sequence[Any], values: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Lets callbacks remember what `take` has returned; by label, so that others may have come or gone."""
    for label, callback in zip(labels(list(callbacks)), callbacks, strict=True):
        for name in _names(callback):
            listed = _listed(arrays, f"callback/{label}/{name}/")
            if listed:
                setattr(callback, name, listed)
            elif name in values.get(label, {}):
                setattr(callback, name, values[label][name])


def plain(value: Any) -> Any:
    """Returns a value as JSON can write it: tensors and NumPy's numbers become Python's."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return np.asarray(value).tolist()


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array that NumPy's files can hold: `bfloat16` and its kin as the `float32` that they are."""
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def _names(callback: Any) -> Iterator[str]:
    for cls, names in REMEMBERED.items():
        if isinstance(callback, cls):
            yield from (name for name in names if hasattr(callback, name))


def _listed(arrays: dict[str, Any], prefix: str) -> list[Any]:
    found = {int(name.removeprefix(prefix)): array for name, array in arrays.items() if name.startswith(prefix)}
    return [found[place] for place in sorted(found)]
