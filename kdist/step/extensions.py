"""Extensions of a model's training step by callbacks, for one `fit`: functions around it, stages of its updates."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kdist.keras_hooks.custom_steps import step_of
from kdist.keras_hooks.fit.callbacks import RunningFit
from kdist.keras_hooks.optimizers import optimizers_of
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.signatures import with_signature_of
from kdist.keras_hooks.trainer import compile_config
from kdist.state.session import session_of
from kdist.step.update import Stage, UpdatePipeline

logger = logging.getLogger("kdist")

Around = Callable[[Callable[[Any], Any], Any], Any]
"""Takes a step and its data; returns the result of the step."""
_Extension = tuple[RunningFit, Around | None, Sequence[Stage]]

_ATTRIBUTE = "_kdist_step_extensions"


class StepExtensions:
    """The extensions of one model's `train_step`, in one process and on several ranks."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._inner = step_of(model, "train_step")
        self._make_inner = model.make_train_function
        self._added: dict[int, _Extension] = {}
        self._compiled: Any = None  # the `compile` whose jit_compile=True is off
        if model.jit_compile:
            logger.warning("jit_compile=True is off while callbacks change the training step: XLA cannot compile them.")
            model.jit_compile, self._compiled = False, compile_config(model)
        self._patches = contextlib.ExitStack()
        for name, method in (("train_step", self._step), ("make_train_function", self._make_train_function)):
            wrapper = with_signature_of(getattr(type(model), name), method)
            self._patches.enter_context(patched(model, name, wrapper))

    def add(self, owner: Any, *, around: Around | None = None, stages: Sequence[Stage] = ()) -> None:
        """Adds a callback's extensions; the step is traced again. Must be called in `on_train_begin`.

        Args:
            owner: the callback.
            around: callable around the step; the first is the innermost.
            stages: sequence of `Stage`, for the updates of all optimizers.
        """
        self._added[id(owner)] = RunningFit(owner), around, stages
        self._model.make_train_function(force=True)

    def remove(self, owner: Any) -> None:
        """Removes a callback's extensions; the next `fit` traces its step again."""
        self._keep({key: each for key, each in self._added.items() if key != id(owner)})

    def _keep(self, kept: dict[int, _Extension]) -> None:
        self._added, self._model.train_function = kept, None
        if not kept:
            self.remove_all()

    def remove_all(self) -> None:
        """Restores the model's own step."""
        self._model.train_function = None
        del vars(self._model)[_ATTRIBUTE]
        self._patches.close()
        if self._compiled is not None and self._compiled is compile_config(self._model):
            self._model.jit_compile = True

    @property
    def stages(self) -> list[Stage]:
        """The stages of all callbacks."""
        return [stage for *_, stages in self._added.values() for stage in stages]

    def _make_train_function(self, *args: Any, **kwargs: Any) -> Any:
        # Called by each `fit` and `train_on_batch`. A `fit` that raised has not called `on_train_end`.
        kept = {key: each for key, each in self._added.items() if not each[0].is_over()}
        if len(kept) < len(self._added):
            self._keep(kept)
        return self._make_inner(*args, **kwargs)

    def _step(self, data: Any) -> Any:
        step = self._inner
        for _, around, _ in self._added.values():
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
