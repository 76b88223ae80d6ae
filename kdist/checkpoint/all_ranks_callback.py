"""Callbacks that all ranks run, if any rank has them, after all other callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import keras

from kdist.checkpoint.callback_state import run_by
from kdist.keras_hooks.fit.callbacks import on_list_ready
from kdist.state.session import TrainingSession, session_of

T = TypeVar("T", bound="AllRanksCallback")


class AllRanksCallback(keras.callbacks.Callback):
    """A callback that knows the other callbacks of its list, and is called after them.

    Attributes:
        others: list of the other callbacks.
        siblings: list of all `AllRanksCallback`, which `others` is without.
        session: `TrainingSession` of the model.
    """

    __signature__: ClassVar[inspect.Signature]
    session: TrainingSession
    position = 0  # of callbacks of this kind among their siblings: backups come before what uses them

    def __init_subclass__(cls) -> None:
        """Shows the arguments of `__init__` to whoever asks for a signature, who would be told those of `__new__`."""
        arguments = inspect.signature(cls.__init__)
        without_self = list(arguments.parameters.values())[1:]
        cls.__signature__ = arguments.replace(parameters=without_self, return_annotation=inspect.Signature.empty)

    def __new__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """Makes the callback known to the lists that it is put into; a copy too."""
        made = super().__new__(cls)
        on_list_ready(made, _move_to_end)
        return made

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Any] = []
        self.siblings: list[AllRanksCallback] = []

    def settings(self) -> dict[str, Any]:
        """Returns the constructor's arguments by name, as JSON values."""
        raise NotImplementedError

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Applies the settings that all ranks use."""
        for name, value in settings.items():
            setattr(self, name, value)

    def set_others(self, others: Sequence[Any], siblings: Sequence[AllRanksCallback]) -> None:
        """Sets the other callbacks of the list."""
        self.others, self.siblings = list(others), list(siblings)

    @property
    def exits(self) -> bool:
        """Whether it saves and exits as soon as it is called, on all ranks: checkpoints must stay."""
        return False

    def before_user_callbacks(self) -> None:
        """Called before the user's callbacks begin, of which one looks at the model then.

        Collective: every rank must call this, in the same order.
        """

    def clean_up(self) -> None:
        """Called at the end of a call, after an error too."""

    def set_model(self, model: keras.Model) -> None:
        """Sets the model and its session."""
        super().set_model(model)
        self.session = session_of(model)

    @property
    def is_chief(self) -> bool:
        """Whether this rank reads and writes files."""
        return self.session.engine.rank == 0


class BeforeUserCallbacks(keras.callbacks.Callback):
    """Comes before the user's callbacks, of which one looks at the model when training begins.

    Args:
        begin: function that is called without arguments.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins."""
        self._begin()


def has_own_train_begin(callback: Any) -> bool:
    """Returns whether a callback has an `on_train_begin` of the user's own, which may look at the model."""
    module = getattr(getattr(callback, "on_train_begin", None), "__module__", None) or ""
    return module.partition(".")[0] not in ("keras", "kdist")


def _move_to_end(listed: keras.callbacks.CallbackList) -> None:
    """Moves such callbacks to the end of a list that Keras has made, in one process; kdist makes those of ranks."""
    siblings = [each for each in listed.callbacks if isinstance(each, AllRanksCallback)]
    siblings.sort(key=lambda each: each.position)
    others = [each for each in listed.callbacks if not isinstance(each, (AllRanksCallback, BeforeUserCallbacks))]
    for each in siblings:
        each.set_others(others, siblings)
    looks = any(has_own_train_begin(run_by(each)) for each in others)
    early = [BeforeUserCallbacks(each.before_user_callbacks) for each in siblings] if looks else []
    listed.callbacks = [*early, *others, *siblings]
