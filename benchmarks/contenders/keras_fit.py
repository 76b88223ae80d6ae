"""Training by Keras' `fit`, which all contenders but PyTorch's share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fit_times import timed_fit
from models import MODELS, compile_model

from contenders.task import WARM_UP_STEPS, Task


def train(
    task: Task,
    keras: Any,
    name: str,
    data: tuple[Any, Any],
    *,
    batch: int = 0,
    wrap: Callable[[Any], Any] = lambda optimizer: optimizer,
    callbacks: Sequence[Any] = (),
) -> None:
    """Trains a model and reports.

    Args:
        task: what to do.
        keras: module, Keras or tf_keras.
        name: str, a key of `MODELS`.
        data: tuple of arrays, rows and labels.
        batch: int, the `batch_size` of `fit`; by default the rows that each rank has in a step.
        wrap: function of the optimizer that returns the one to train with.
        callbacks: sequence of callbacks.
    """
    model = MODELS[name].build(keras)
    compile_model(keras, model, wrap)
    batch_size = batch or MODELS[name].batch
    fit = functools.partial(model.fit, *data, batch_size=batch_size, verbose=0)
    fit(steps_per_epoch=WARM_UP_STEPS, callbacks=list(callbacks))
    task.report(name, timed_fit(keras, fit, callbacks), [value.numpy() for value in model.trainable_variables])
