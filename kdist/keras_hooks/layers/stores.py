"""The stores that Keras gives to layers and optimizers to save their variables in, and to load them from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from keras.src.saving import saving_lib

from kdist.keras_hooks.patching import patched

_MEMORY_CHECK = "is_memory_sufficient"


class _Nowhere(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras has no types
    """A store that keeps nothing."""

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
        return _Nothing()


class _Nothing(dict[str, Any]):
    """What is saved under a path of it."""

    def __setitem__(self, name: str, value: Any) -> None:
        pass


def keeps_nothing(store: Any) -> bool:
    """Returns whether a store, as a layer gets it, is one of `save_nowhere`."""
    return isinstance(store, _Nothing)


def make_array(store: Any, name: str, shape: Sequence[int], dtype: Any) -> Any:
    """Returns an array to write to: a data set of a store that is an HDF5 file, else one that is not in the store."""
    if type(store) is not saving_lib.H5IOStore or np.dtype(dtype).isbuiltin != 1:  # `bfloat16`, which Keras marks
        return np.empty(shape, dtype)
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(name, tuple(shape), dtype)


def open_array(store: Any, name: str) -> Any:
    """Returns what a store has under a name: of an HDF5 file a data set, which is read when it is sliced."""
    if type(store) is saving_lib.H5IOStore:
        found = saving_lib.safe_get_h5_dataset(store._h5_entry_group, name)
        if "dtype" not in found.attrs:
            return found
    return store[name]


@contextlib.contextmanager
def weights_on_disk(is_large: Callable[[Any], bool]) -> Iterator[None]:
    """Makes Keras read and write the weights of some models in a file on disk, not in one in memory."""
    fits = saving_lib.is_memory_sufficient
    with patched(saving_lib, _MEMORY_CHECK, lambda model: not is_large(model) and fits(model)):
        yield


def save_nowhere(model: Any, skipped: Sequence[Any] = ()) -> None:
    """Calls all that a file of a model, without some objects, is written by, in the same order, and writes none."""
    saving_lib._save_state(model, _Nowhere(), None, "", {id(each) for each in skipped})
