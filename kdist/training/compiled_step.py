"""`jit_compile=True` where gradients are summed over ranks: XLA compiles a step up to the update.

Keras would compile the whole step, in which no message can be sent. What is compiled here is all that computes: the
forward and the backward pass, the loss, the metrics. The gradients come out, are reduced, and applied.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.errors import EngineError
from kdist.training.step import Step

logger = logging.getLogger("kdist")


class CompiledSteps:
    """The steps of a model whose user asked for XLA.

    Args:
        model: `keras.Model`.
        engine: `Engine`, none of whose collectives XLA can compile.
    """

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._config: Any = None  # of the `compile` that asked
        self._said: set[str] = set()

    def take_over(self) -> None:
        """Keeps Keras from compiling whole steps. To be called when a verb begins."""
        if self._model.jit_compile:
            self._model.jit_compile = False
            self._config = self._model._compile_config

    def run(self, name: str, step: Step, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Runs a step, compiled but for the update if it was asked for and can be.

        Args:
            name: str, the model's method.
            step: `Step`, open.
            run: callable that runs the step and returns tensors and what is none.

        Returns:
            What `run` returns.
        """
        if not self._is_wanted():
            return run()
        why = self._obstacle(name)
        if not why:
            before = step.notes()
            try:
                with self._engine.refusing("XLA compiles this step"):
                    tensors, other, updates = self._compiled(name, run)
            except EngineError:
                step.restore(before)
                why = (
                    "its loss or its layers send messages before the gradients are there, as masks and synchronised "
                    "batch normalisation do"
                )
            else:
                if updates:
                    self._model.optimizer.apply_gradients(updates)
                return tensors, other
        if why not in self._said and self._engine.rank == 0:
            logger.warning("jit_compile=True is off for this model: %s.", why)
        self._said.add(why)
        return run()

    def _is_wanted(self) -> bool:
        model = self._model
        return self._config is not None and model._compile_config is self._config and not model.run_eagerly

    def _obstacle(self, name: str) -> str:
        """Returns what stands against compiling a step, as far as it is known before; `""` if nothing does."""
        if getattr(type(self._model), name) is not getattr(keras.Model, name):
            return f"it has a {name} of its own, in which XLA would compile the update as well"
        if "_kdist_step_wrappers" in self._model.__dict__:
            return "callbacks look into its training step, which XLA cannot compile"
        return ""

    def _compiled(self, name: str, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """Returns what `run` returns, and the gradients and variables that it asks the optimizer to apply."""
        optimizer = self._model.optimizer if name == "train_step" else None
        others: list[Any] = []
        updated: list[Any] = []

        def traced() -> tuple[Any, list[Any]]:
            with _updates_noted(optimizer) as updates:
                tensors, other = run()
            others.append(other)
            updated[:] = [variable for _, variable in updates]
            return tensors, [gradient for gradient, _ in updates]

        # A function of its own each time: what is noted while it is traced must be noted every time.
        tensors, gradients = tf.function(traced, jit_compile=True, autograph=False)()
        return tensors, others[-1], list(zip(gradients, updated, strict=True))


@contextlib.contextmanager
def _updates_noted(optimizer: keras.optimizers.Optimizer | None) -> Iterator[list[tuple[Any, Any]]]:
    """Gives the gradients and variables that an optimizer is asked to apply, in the place of applying them."""
    updates: list[tuple[Any, Any]] = []
    if optimizer is None:
        yield updates
        return
    apply_gradients = optimizer.__dict__["apply_gradients"]  # the step's own, which reduces
    optimizer.__dict__["apply_gradients"] = updates.extend
    try:
        yield updates
    finally:
        optimizer.__dict__["apply_gradients"] = apply_gradients
