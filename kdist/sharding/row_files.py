"""Tables, and slots, of which ranks hold rows, in files: rows travel block by block to the ranks that write."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.layers.parts import Holder
from kdist.keras_hooks.layers.stores import keeps_nothing, make_array, open_array, save_nowhere
from kdist.keras_hooks.patching import original, patch
from kdist.state.comparison import gather_values


def save_rows(store: Any, name: str, variable: Any, holder: Holder) -> None:
    """Writes all rows of a variable to a store.

    Collective: every rank must call this, in the same order; those whose store keeps nothing send their rows.

    Args:
        store: what Keras gives to `save_own_variables`.
        name: str, the name in the store.
        variable: `keras.Variable`.
        holder: `Holder`.
    """
    if (sent := _SENT.get()) is not None and sent.has_been_sent():
        return
    keeps = gather_values(holder.engine, "the save of state in parts", not keeps_nothing(store))
    shape = holder.shape(variable)
    blocks = holder.blocks(variable, [rank for rank, it in enumerate(keeps) if it])
    try:
        if keeps[holder.engine.rank]:
            array = make_array(store, name, shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
            for start, block in blocks:
                rows = slice(start, start + len(block)) if shape else ()
                array[rows] = block if shape else block[0]
            if name not in store:
                store[name] = array
    finally:
        for _ in blocks:  # also if the file cannot be written: other ranks send them
            pass


class _Sent:
    """The variables whose rows a file has asked for, and those of them that are not to be sent again."""

    def __init__(self) -> None:
        self.number = 0
        self._num_skipped = 0

    def has_been_sent(self) -> bool:
        """Counts a variable, and returns whether it has been sent before."""
        if self._num_skipped:
            self._num_skipped -= 1
            return True
        self.number += 1
        return False

    def begin_again(self) -> None:
        """Lets those be skipped that have been sent."""
        self._num_skipped = self.number


_SENT: contextvars.ContextVar[_Sent | None] = contextvars.ContextVar("kdist_rows_sent", default=None)


@contextlib.contextmanager
def all_rows_sent(model: keras.Model, skipped: Sequence[Any] = ()) -> Iterator[None]:
    """Sends the rows of a model that a file has not asked for, where its writing fails or is declined.

    The other ranks send the rows of all variables, and would wait for this one.

    Args:
        model: `keras.Model`, which is written in the context.
        skipped: sequence of objects that are not written.
    """
    if _SENT.get() is not None:  # `model.save` calls `saving_lib.save_model`
        yield
        return
    sent, is_written = _Sent(), False
    token = _SENT.set(sent)
    try:
        yield
        is_written = sent.number > 0
    finally:
        if not is_written:
            sent.begin_again()
            save_nowhere(model, skipped)
        _SENT.reset(token)


class RowStore:
    """A store as Keras gives it to a layer, in which tables in parts are read and written by rows.

    Args:
        store: the store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __contains__(self, name: str) -> bool:
        return name in self._store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, name: str) -> Any:
        return open_array(self._store, name)

    def __setitem__(self, name: str, value: Any) -> None:
        table = table_of(value)
        if table is None:
            self._store[name] = value
        else:
            save_rows(self._store, name, value, table)


def save_by_rows(layer: keras.layers.Embedding) -> None:
    """Makes a layer save and load its table in parts by rows, for the layer's life."""
    for name in ("save_own_variables", "load_own_variables"):
        run = original(layer, name)
        patch(layer, name, lambda store, run=run: run(RowStore(store)))
