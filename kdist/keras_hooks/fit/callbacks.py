"""Keras' callbacks: their list, their state, and how they write."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.utils.io_utils import print_msg as print_msg
from keras.src.utils.python_utils import is_default

from kdist.keras_hooks.patching import patched

SAVED_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
"""The attributes with the state of Keras' callbacks, by class; for subclasses too."""

SAVE_MODEL, LOAD_MODEL, SHOULD_SAVE = "_save_model", "_load_model", "_should_save_model"


def is_called_each_step(callback: Any, prefixes: Sequence[str] = ("", "train_")) -> bool:
    """Returns whether a callback overrides a method that is called at each step, of training by default."""
    names = [f"on_{prefix}batch_{moment}" for prefix in prefixes for moment in ("begin", "end")]
    return not all(is_default(getattr(callback, name)) for name in names)


def call_in_this_thread(callbacks: keras.callbacks.CallbackList) -> None:
    """Makes a list call its callbacks in this thread."""
    callbacks._async_train = callbacks._async_test = callbacks._async_predict = False


def saves_as_keras_does(callback: Any) -> bool:
    """Returns whether a callback is a `ModelCheckpoint` that does not override the saving."""
    checkpoint = keras.callbacks.ModelCheckpoint
    return isinstance(callback, checkpoint) and type(callback)._save_model is checkpoint._save_model


def checkpoint_decision(callback: Any) -> Callable[..., None]:
    """Returns a replacement for a `ModelCheckpoint`'s save, which updates `best` and writes no file."""

    def decide(epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        callback._should_save_model(epoch, batch, logs, "")  # the logs of this rank may have no name for a file

    return decide


def checkpoint_parts(callback: Any) -> Callable[..., None]:
    """Returns a replacement for a `ModelCheckpoint`'s save that calls `model.save`, and makes no directory for it."""

    def save(epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        path = callback._get_file_path(epoch, batch, logs)
        if callback._should_save_model(epoch, batch, logs, path):
            write = callback.model.save_weights if callback.save_weights_only else callback.model.save
            write(path, overwrite=True)

    return save


def given_callbacks(arguments: Mapping[str, Any]) -> list[keras.callbacks.Callback]:
    """Returns the callbacks among the arguments of a `fit`, also of a `CallbackList`."""
    given = arguments.get("callbacks")
    return list(keras.tree.flatten(getattr(given, "callbacks", given) or []))


def weights_path(callback: keras.callbacks.BackupAndRestore) -> str:
    """Returns the file that Keras' own `BackupAndRestore` writes."""
    return callback._weights_path


def on_list_ready(callback: Any, function: Callable[[keras.callbacks.CallbackList], None]) -> None:
    """Calls `function(list)` when a `CallbackList` with the callback gets its model, during the callback's life.

    Keras sets a callback's model and parameters, but it does not pass the other callbacks. Of several callbacks in one
    list that have the same function, it is called once.

    Args:
        callback: `keras.callbacks.Callback`, held weakly.
        function: callable, which may replace `list.callbacks`.
    """
    hook = getattr(keras.callbacks.CallbackList.set_model, "hook", None)
    hook = _ListHook() if hook is None else hook
    hook.functions[callback] = function
    weakref.finalize(callback, hook.restore_if_unused)


class RunningFit:
    """The `fit` in whose `on_train_begin` it is made: Keras calls no callback when a `fit` has raised.

    Args:
        callback: `keras.callbacks.Callback`, in the list of that `fit`.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._is_found = _is_called_by_fit(callback, inspect.currentframe())
        self._history = getattr(callback.model, "history", None)

    def is_over(self, frame: FrameType | None = None) -> bool:
        """Returns whether it has returned or raised.

        A callback that another callback calls, or a loop of the user's, is in the list of no `fit`: there it is over
        when another `fit` has begun.

        Args:
            frame: the innermost frame of the thread in which `fit` would run; the caller's by default.
        """
        if self._is_found:
            return not _is_called_by_fit(self._callback, frame or inspect.currentframe())
        return getattr(self._callback.model, "history", None) is not self._history  # Keras makes one for each `fit`


def _is_called_by_fit(callback: Any, frame: FrameType | None) -> bool:
    """Returns whether a frame or one of its callers is a `fit` of Keras with a callback in its list."""
    lists = (names.get("callbacks") for names in _running_fits(frame))
    return any(each is callback for listed in lists for each in getattr(listed, "callbacks", ()))


def _running_fits(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Yields the local names of each `fit` of Keras that is a frame or one of its callers."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_globals is vars(trainer_module):
            yield frame.f_locals
        frame = frame.f_back


def running_epoch_iterator(model: keras.Model) -> TFEpochIterator | None:
    """Returns Keras' own epoch iterator of a model's running `fit`, if it has one."""
    names = next((each for each in _running_fits(inspect.currentframe()) if each.get("self") is model), {})
    found = names.get("epoch_iterator")
    return found if type(found) is TFEpochIterator else None


def steps_of_pass(iterator: TFEpochIterator | None) -> int:
    """Returns the steps of a pass over data that epochs share, as with `steps_per_epoch`; 0 where each has its own."""
    if iterator is None or not iterator.steps_per_epoch or iterator._current_iterator is None:
        return 0
    return int(iterator._steps_seen)


def add_steps_of_pass(iterator: TFEpochIterator, steps: int) -> None:
    """Counts steps of a pass that were drawn beside Keras' own loop."""
    iterator._steps_seen += steps


class _ListHook:
    """The patch of `CallbackList.set_model`, for the life of the callbacks in `functions`."""

    def __init__(self) -> None:
        self.functions: weakref.WeakKeyDictionary[Any, Callable[..., None]] = weakref.WeakKeyDictionary()
        original = keras.callbacks.CallbackList.set_model

        def set_model(listed: Any, model: keras.Model) -> None:
            original(listed, model)
            known = {id(each): function for each, function in self.functions.items()}  # a user's may have no hash
            functions = [known[id(each)] for each in listed.callbacks if id(each) in known]
            for function in dict.fromkeys(functions):
                function(listed)

        set_model.hook = self  # type: ignore[attr-defined]
        self._context = patched(keras.callbacks.CallbackList, "set_model", set_model)
        self._context.__enter__()

    def restore_if_unused(self) -> None:
        """Restores Keras' method when the last callback is deleted."""
        is_unused = not list(self.functions)  # its length still counts the callback that is being deleted
        if is_unused and getattr(keras.callbacks.CallbackList.set_model, "hook", None) is self:
            self._context.__exit__(None, None, None)
