"""What is put around a model's training step for the time of one `fit`: callbacks that must look into the step."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist.training.arguments import like

logger = logging.getLogger("kdist")

StepWrapper = Callable[[Callable[[Any], Any], Any], Any]
"""Gets the step that it is around and the step's data; returns what the step is to return."""


class StepWrappers:
    """The wrappers around one model's `train_step`, the first one innermost. They work in any strategy, and without.

    Args:
        model: `keras.Model`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._inner = model.train_step
        self._before = {name: value for name, value in model.__dict__.items() if name == "train_step"}
        self._fit = getattr(model, "history", None)  # Keras makes a new one for each `fit`
        self._wrappers: list[StepWrapper] = []
        self._jit_compile = model.jit_compile
        if model.jit_compile:
            logger.warning(
                "jit_compile=True is off while callbacks look into the training step: XLA cannot compile them."
            )
            model.jit_compile = False
        model.__dict__["train_step"] = like(type(model).train_step, self._step)

    def put(self, wrapper: StepWrapper) -> None:
        """Puts a wrapper around the step, which is traced anew. To be called while `fit` begins."""
        fit = getattr(self._model, "history", None)
        if self._fit is not fit:
            self._fit, self._wrappers = fit, []  # left behind by a `fit` that was interrupted
        self._wrappers.append(wrapper)
        self._model.make_train_function(force=True)

    def take_off(self, wrapper: StepWrapper) -> None:
        """Takes a wrapper off; the next `fit` traces its step anew."""
        self._wrappers = [each for each in self._wrappers if each != wrapper]
        self._model.train_function = None
        if not self._wrappers:
            self.take_all_off()

    def take_all_off(self) -> None:
        """Gives the model its own step back."""
        self._model.train_function = None
        del self._model.__dict__["train_step"], self._model.__dict__["_kdist_step_wrappers"]
        self._model.__dict__.update(self._before)
        self._model.jit_compile = self._jit_compile

    def _step(self, data: Any) -> Any:
        step = self._inner
        for wrapper in self._wrappers:
            step = functools.partial(wrapper, step)
        return step(data)


def step_wrappers(model: keras.Model) -> StepWrappers:
    """Returns the wrappers around a model's training step, none at first."""
    if "_kdist_step_wrappers" not in model.__dict__:
        model.__dict__["_kdist_step_wrappers"] = StepWrappers(model)
    return model.__dict__["_kdist_step_wrappers"]


@contextlib.contextmanager
def none_left_behind(model: keras.Model) -> Iterator[None]:
    """Takes off, when the context is left, what a `fit` that raised did not."""
    try:
        yield
    finally:
        if "_kdist_step_wrappers" in model.__dict__:
            step_wrappers(model).take_all_off()


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute on an instance while the context is open."""
    before = {key: old for key, old in vars(thing).items() if key == name}
    thing.__dict__[name] = value
    try:
        yield
    finally:
        thing.__dict__.pop(name, None)
        thing.__dict__.update(before)
