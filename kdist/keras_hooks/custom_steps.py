"""The steps that a user has set on a model's instance, which kdist's call: they replace them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from kdist.keras_hooks.patching import original, python_function_of
from kdist.keras_hooks.trainer import CUSTOM_STEPS, patch_methods


def step_of(model: keras.Model, name: str) -> Callable[..., Any]:
    """Returns a model's step, of the instance or else of its class, and no `tf.function`."""
    own = vars(model).get(name)
    return original(model, name) if own is None else python_function_of(own)


class CustomSteps:
    """The user's steps of one model: those of the instance, else those of its class.

    Args:
        model: `keras.Model`.
        steps: mapping of names to the steps that replace them on the instance.
    """

    def __init__(self, model: keras.Model, steps: Mapping[str, Callable[..., Any]]) -> None:
        self._model = model
        self._steps = steps
        self._patched: dict[str, Any] = {}
        self._own: dict[str, Any] = {}  # those that the user has set on the instance
        self._running: set[str] = set()

    def patch(self) -> None:
        """Replaces the steps on the instance, and keeps those that the user has set there since."""
        methods = vars(self._model)
        for name, step in self._steps.items():
            given = methods.get(name)
            if given is None or given is not self._patched.get(name):
                patch_methods(self._model, {name: step})
                self._patched[name], self._own[name] = methods.get(name), given
        methods[CUSTOM_STEPS] = {name for name, own in self._own.items() if own is not None}

    def get(self, name: str) -> Callable[..., Any]:
        """Returns the user's step of the instance, else the class's, which the first may call as the model's."""
        own = self._own[name]
        if own is None or name in self._running:
            return original(self._model, name)

        def run(data: Any) -> Any:
            self._running.add(name)
            try:
                return python_function_of(own)(data)
            finally:
                self._running.discard(name)

        return run
