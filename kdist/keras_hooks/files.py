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
"""What `keras.saving.save_model`, `tf.saved_model.save` and the like call, whatever a script has imported.

The first argument is what is saved.
"""

DOWNLOAD, EXTRACT = (file_utils, "urlretrieve"), (file_utils, "extract_archive")
"""What `keras.utils.get_file` calls: of an address and a file's name, and of an archive and a directory's name."""


@contextlib.contextmanager
def replaced(place: tuple[ModuleType, str], wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a function of a module by `wrap(function)` while the context is open."""
    module, name = place
    with patched(module, name, wrap(getattr(module, name))):
        yield
