"""Extensions of a model's training step by callbacks, for one `fit`: functions around it, stages of its updates."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kdist.keras_hooks.optimizers import optimizers_of
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.signatures import with_signature_of
from kdist.state.session import session_of
from kdist.step.update import Stage, UpdatePipeline

logger = logging.getLogger("kdist")

Around = Callable[[Callable[[Any], Any], Any], Any]
"""Takes a step and its data; returns the result of the step."""

_ATTRIBUTE = "_kdist_step_extensions"


class StepExtensions:
    """The extensions of one model's `train_step`, in one process and on several ranks."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._inner = model.train_step
        self._fit = getattr(model, "history", None)  # Keras makes a new one for each `fit`
        self._added: dict[Any, tuple[Around | None, Sequence[Stage]]] = {}
        self._jit_compile = model.jit_compile
        if model.jit_compile:
            logger.warning("jit_compile=True is off while callbacks change the training step: XLA cannot compile them.")
            model.jit_compile = False
        self._patch = patched(model, "train_step", with_signature_of(type(model).train_step, self._step))
        self._patch.__enter__()

    def add(self, owner: Any, *, around: Around | None = None, stages: Sequence[Stage] = ()) -> None:
        """Adds a callback's extensions; the step is traced again. Must be called in `on_train_begin`.

        Args:
            owner: the callback.
            around: callable around the step; the first is the innermost.
            stages: sequence of `Stage`, for the updates of all optimizers.
        """
        fit = getattr(self._model, "history", None)
        if self._fit is not fit:
            self._fit, self._added = fit, {}  # those of a `fit` that raised are dropped
        self._added[id(owner)] = around, stages
        self._model.make_train_function(force=True)

    def remove(self, owner: Any) -> None:
        """Removes a callback's extensions; the next `fit` traces its step again."""
        self._added.pop(id(owner), None)
        self._model.train_function = None
        if not self._added:
            self.remove_all()

    def remove_all(self) -> None:
        """Restores the model's own step."""
        self._model.train_function = None
        del vars(self._model)[_ATTRIBUTE]
        self._patch.__exit__(None, None, None)
        self._model.jit_compile = self._jit_compile

    @property
    def stages(self) -> list[Stage]:
        """The stages of all callbacks."""
        return [stage for _, stages in self._added.values() for stage in stages]

    def _step(self, data: Any) -> Any:
        step = self._inner
        for around, _ in self._added.values():
            step = step if around is None else functools.partial(around, step)
        if session_of(self._model).runs_update_pipeline:
            return step(data)
        with UpdatePipeline(self.stages).opened(optimizers_of(self._model)):
            return step(data)


def step_extensions(model: keras.Model) -> StepExtensions:
    """Returns the extensions of a model's training step, empty at first."""
    if not has_extensions(model):
        vars(model)[_ATTRIBUTE] = StepExtensions(model)
    return vars(model)[_ATTRIBUTE]


def has_extensions(model: keras.Model) -> bool:
    """Returns whether a model's training step has extensions."""
    return _ATTRIBUTE in vars(model)


def added_stages(model: keras.Model) -> list[Stage]:
    """Returns the stages that callbacks have added to a model's updates."""
    return step_extensions(model).stages if has_extensions(model) else []


@contextlib.contextmanager
def extensions_removed_at_exit(model: keras.Model) -> Iterator[None]:
    """Removes all extensions at exit, as a `fit` that raises does not call `on_train_end`."""
    try:
        yield
    finally:
        if has_extensions(model):
            step_extensions(model).remove_all()
