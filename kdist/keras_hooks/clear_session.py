"""`keras.utils.clear_session`, which forgets open scopes and Keras' settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kdist._tf_internals import default_graphs, keep_open_scopes
from kdist.keras_hooks.patching import patched


@contextlib.contextmanager
def scopes_outlive_clear_session(set_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keeps a strategy's scope open when the user's code calls `clear_session`, under any of its names.

    Args:
        set_up: callable, called now and after each `clear_session`, which resets Keras' settings.
    """
    original = default_graphs.reset

    def reset() -> None:
        keep_open_scopes(original)
        set_up()

    set_up()
    with patched(default_graphs, "reset", reset):
        yield
