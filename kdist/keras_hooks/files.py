"""The functions of Keras and TensorFlow that write files: models, downloads, archives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import file_utils

from kdist._tf_internals import saved_model_module
from kdist.keras_hooks.patching import patched

SAVE = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (saved_model_module, "save_and_return_nodes"),
)
"""What `keras.saving.save_model`, `tf.saved_model.save` and their kin call, whatever a script has imported.

The first argument is what is saved.
"""

DOWNLOAD, EXTRACT = (file_utils, "urlretrieve"), (file_utils, "extract_archive")
"""What `keras.utils.get_file` calls: of an address and a file's name, and of an archive and a directory's name."""


class _Nowhere(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras has no types
    """A store that keeps nothing."""

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
        return _ReadTables()


class _ReadTables(dict[str, Any]):
    """Reads each table in parts once, as a file does: all ranks send their rows."""

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(value, "kdist_table"):
            value.numpy()


def save_nowhere(model: Any) -> None:
    """Calls all that a file of a model is written by, in the same order, and writes none."""
    saving_lib._save_state(model, _Nowhere(), None, "", set())


@contextlib.contextmanager
def replaced(place: tuple[ModuleType, str], wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a function of a module by `wrap(function)` while the context is open."""
    module, name = place
    with patched(module, name, wrap(getattr(module, name))):
        yield
