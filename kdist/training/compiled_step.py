"""`jit_compile=True` where gradients are summed over ranks: XLA compiles a step up to the update.

Keras would compile the whole step, in which no message can be sent. What is compiled here is all that computes: the
forward and the backward pass, the loss, the metrics. The gradients come out, are reduced, and applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.errors import EngineError
from kdist.training.step import Step


def compiled_step(
    run: Callable[[], tuple[Any, Any]],
    step: Step,
    optimizer: keras.optimizers.Optimizer | None,
    engine: Engine,
) -> tuple[Any, Any] | None:
    """Runs one of Keras' own steps, compiled, but for the update.

    Args:
        run: callable that runs the step and returns tensors and what is none.
        step: the open `Step`.
        optimizer: the model's optimizer, whose `apply_gradients` is called at the end; `None` where nothing is updated.
        engine: `Engine`, none of whose collectives XLA can compile.

    Returns:
        What `run` returns, or `None` if it has to send messages before the gradients are there, and so cannot be
        compiled.
    """
    others: list[Any] = []
    updated: list[Any] = []

    def traced() -> tuple[Any, list[Any]]:
        with _updates_noted(optimizer) as updates:
            tensors, other = run()
        others.append(other)
        updated[:] = [variable for _, variable in updates]
        return tensors, [gradient for gradient, _ in updates]

    before = step.notes()
    try:
        with engine.refusing("XLA compiles this step"):
            # A function of its own each time: what is noted while it is traced must be noted every time.
            tensors, gradients = tf.function(traced, jit_compile=True, autograph=False)()
    except EngineError:
        step.restore(before)
        return None
    if updated and optimizer is not None:
        optimizer.apply_gradients(zip(gradients, updated, strict=True))
    return tensors, others[-1]


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
