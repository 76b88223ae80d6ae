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
    meet: Callable[[], None] = lambda: None,
    **options: Any,
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
        meet: function that returns when all processes have called it, called before the fit that is measured.
        options: what else `compile` is given.
    """
    model = MODELS[name].build(keras)
    compile_model(keras, model, wrap, **options)
    batch_size = batch or MODELS[name].batch
    fit = functools.partial(model.fit, verbose=0, **given(task.input, data, batch_size))
    fit(steps_per_epoch=WARM_UP_STEPS, callbacks=list(callbacks))
    meet()
    task.report(name, timed_fit(keras, fit, callbacks), [value.numpy() for value in model.trainable_variables])


def given(kind: str, data: tuple[Any, Any], batch_size: int) -> dict[str, Any]:
    """Returns arguments of `fit` for one epoch over the data, given in one of the ways of `INPUTS`."""
    if kind == "arrays":
        return {"x": data[0], "y": data[1], "batch_size": batch_size}
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    if kind == "slices":
        return {"x": batches.prefetch(2)}
    return {"x": batches.cache().repeat().prefetch(2), "steps_per_epoch": int(batches.cardinality())}
