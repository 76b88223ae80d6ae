"""`jit_compile=True` on several ranks: XLA compiles a step up to the update.

XLA cannot compile collectives. Compiled are the forward and the backward pass, the loss and the metrics; gradients are
outputs of the compiled function, and the update pipeline, which reduces them, runs outside of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import EngineError
from kdist.keras_hooks.trainer import compile_config, is_overridden
from kdist.step.extensions import has_extensions
from kdist.step.step import Step

logger = logging.getLogger("kdist")


class CompiledSteps:
    """The steps of a model that was compiled with `jit_compile=True`."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._config: Any = None  # of the `compile` with jit_compile=True
        self._reported: set[str] = set()

    def disable_keras_compilation(self) -> None:
        """Keeps Keras from compiling whole steps. Must be called before each call of `fit` and the like."""
        if self._model.jit_compile:
            self._model.jit_compile = False
            self._config = compile_config(self._model)

    def run(self, name: str, step: Step, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any] | None:
        """Runs a step, compiled up to the update.

        Args:
            name: str, the model's method.
            step: `Step`, which is opened here; it may be opened again afterwards.
            run: callable that runs the step and returns a structure of tensors and any other value.

        Returns:
            What `run` returns, or `None` if the step cannot be compiled, which is logged once.
        """
        reason = self._obstacle(name)
        if not reason:
            try:
                return self._run_compiled(step, run)
            except _NotCompilable:
                reason = (
                    "its losses, metrics or layers send messages before the gradients are there, as masks, "
                    "synchronised batch normalisation, and losses that are no mean over the rows do"
                )
        if reason not in self._reported and step.engine.rank == 0:
            logger.warning("jit_compile=True is off for this model: %s.", reason)
        self._reported.add(reason)
        return None

    @property
    def is_requested(self) -> bool:
        """Whether the user asked for XLA in the last `compile`."""
        model = self._model
        return self._config is not None and compile_config(model) is self._config and not model.run_eagerly

    def _obstacle(self, name: str) -> str:
        """Returns why a step cannot be compiled, if that is known before the attempt, else `""`."""
        if is_overridden(self._model, name):
            return f"it has a {name} of its own, in which XLA would compile the update as well"
        if has_extensions(self._model):
            return "callbacks change its training step, which XLA cannot compile"
        return ""

    def _run_compiled(self, step: Step, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        others: list[Any] = []
        collected: list[Any] = []
        with step.opened(self._model) as pipeline:

            def traced() -> tuple[Any, list[Any]]:
                with contextlib.ExitStack() as stack:
                    updates = stack.enter_context(pipeline.collecting()) if pipeline is not None else []
                    tensors, other = run()
                others.append(other)
                collected[:] = [(optimizer, [variable for _, variable in pairs]) for optimizer, pairs in updates]
                return tensors, [[gradient for gradient, _ in pairs] for _, pairs in updates]

            try:
                # A new function each time: `traced` must run, as it fills the lists.
                tensors, gradients = tf.function(traced, jit_compile=True, autograph=False)()
            except EngineError as error:
                raise _NotCompilable from error
            for (optimizer, variables), grads in zip(collected, gradients, strict=True):
                optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        return tensors, others[-1]


class _NotCompilable(Exception):
    """The part to compile sends messages."""
