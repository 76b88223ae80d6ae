"""The state of Keras' callbacks, which checkpoints contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kdist.keras_hooks.fit.callbacks import SAVED_ATTRIBUTES
from kdist.state.part import State, StatePart

KDIST_SAVED = "_kdist_saved"
"""The attribute by which a class of kdist names what checkpoints contain of its objects."""


class CallbackState(StatePart):
    """The state of a list of callbacks, by label, so that a resumed training may have other callbacks.

    It is that of Keras' own callbacks, and what a callback of kdist names by `KDIST_SAVED`.
    """

    name = "callbacks"

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)

    def state_dict(self) -> State:
        """Returns the saved attributes of the callbacks; lists of arrays as one entry per array."""
        values: dict[str, dict[str, Any]] = {}
        arrays: dict[str, Any] = {}
        for label, callback, name in self._attributes():
            value = getattr(callback, name)
            if isinstance(value, list) and value and all(isinstance(each, (np.ndarray, np.generic)) for each in value):
                arrays.update({f"{label}/{name}/{place}": _storable(each) for place, each in enumerate(value)})
            else:
                values.setdefault(label, {})[name] = plain(value)
        return {"values": values, **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the saved attributes of the callbacks."""
        for label, callback, name in self._attributes():
            count = sum(key.startswith(f"{label}/{name}/") for key in state)
            if count:
                setattr(callback, name, [state[f"{label}/{name}/{place}"] for place in range(count)])
            elif name in state["values"].get(label, {}):
                setattr(callback, name, state["values"][label][name])

    def _attributes(self) -> Iterator[tuple[str, Any, str]]:
        for label, given in zip(labels(self._callbacks), self._callbacks, strict=True):
            callback = run_by(given)
            for cls, names in SAVED_ATTRIBUTES.items():
                if isinstance(callback, cls):
                    yield from ((label, callback, name) for name in names if hasattr(callback, name))
            yield from ((label, callback, name) for name in getattr(callback, KDIST_SAVED, ()))


def run_by(callback: Any) -> Any:
    """Returns the callback that a callback such as `ChiefOnly` runs, or the callback itself."""
    within = getattr(callback, "callback", None)
    return within if isinstance(within, keras.callbacks.Callback) else callback


def labels(callbacks: Sequence[Any]) -> list[str]:
    """Returns labels of callbacks that are equal on all ranks: the class, and an index in that class."""
    names = [f"{type(each).__module__}.{type(each).__qualname__}" for each in callbacks]
    return [f"{name}#{names[:place].count(name)}" for place, name in enumerate(names)]


def plain(value: Any) -> Any:
    """Returns a value as JSON can write it, without tensors and NumPy numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return np.asarray(value).tolist()


def _storable(array: Any) -> np.ndarray:
    """Returns an array that NumPy's files can hold: `float32` for `bfloat16` and similar dtypes; a scalar as one."""
    array = np.asarray(array)
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
