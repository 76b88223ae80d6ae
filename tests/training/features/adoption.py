"""Models that were made or used elsewhere: without an input shape, outside of the scope, in another scope."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    both,
    compare,
    fed,
    fit_alone,
    fit_evaluate_predict,
    fresh,
    mlp,
    outcome,
    rows,
    size,
)


@feature
def a_second_model_begins_alike() -> None:
    """What is drawn from the user's seeds after a fit is what one process would have drawn."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        drawn = []
        for _ in range(2):
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            drawn.append(model.get_weights()[0].copy())
            model.fit(x, y, batch_size=batch, epochs=1, verbose=0)
            drawn.append(np.random.default_rng(int(np.random.randint(1000))).normal(size=3))
        return {"drawn": drawn}

    both(script)


@feature
def unbuilt_models() -> None:
    """A model without an input shape is built on the first batch, which is not lost."""
    for kind in ("arrays", "tf_data", "py_dataset", "generator"):
        x, y = rows("ragged")

        def script(batch: int, kind: str = kind, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = keras.Sequential(
                [
                    keras.layers.Dense(3, kernel_initializer="ones", activation="tanh"),
                    keras.layers.Dense(2, kernel_initializer="ones"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            return fit_alone(model, fed(kind, (x, y), batch))

        both(script)


@feature
def adopted() -> None:
    """A model built and compiled outside of the scope, with other weights on each rank, is adopted with the root's."""
    keras.config.set_floatx("float64")
    x, y = rows("ragged")
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    for variable in model.trainable_variables:
        variable.assign_add(np.full(variable.shape, float(kdist.rank())))
    plain = fit_evaluate_predict(reference, fed("arrays", (x, y), size() * BATCH), x, y, size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = fit_evaluate_predict(model, fed("arrays", (x, y), BATCH), x, y, BATCH)
    compare(plain, ours)


@feature
def used_before_the_scope() -> None:
    """Functions that Keras made outside of the scope hold the class's own steps: inside they are made anew."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = before.pop()
        history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        return outcome(model, history, evaluate=model.evaluate(x, y, batch_size=batch, verbose=0))

    fresh()
    before = [mlp(), mlp()]
    for model in before:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.evaluate(x, y, verbose=0)
    plain = script(size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    compare(plain, ours)


@feature
def used_in_the_next_scope() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        if not made:
            made.append(mlp())
            made[0].compile(keras.optimizers.Adam(0.01), "mse")
        return outcome(made[0], made[0].fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0))

    fresh()
    made: list[keras.Model] = []
    plain = [script(size() * BATCH) for _ in range(2)]
    made.clear()
    ours = []
    for _ in range(2):
        with kdist.scope(scale_lr=None):
            ours.append(script(BATCH))
    for one, other in zip(plain, ours, strict=True):
        compare(one, other)


@feature
def steps_set_on_the_instance() -> None:
    """Before the scope or in it; such a step calls the class's, or the one that the model had."""
    x, y = rows("ragged")

    def made(before: keras.Model | None = None) -> keras.Model:
        model = mlp() if before is None else before
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def doubled(model: keras.Model, inner: Callable[[Any], Any]) -> keras.Model:
        def train_step(self: keras.Model, data: Any) -> Any:
            inputs, targets = data
            return {**inner((2.0 * inputs, targets)), "largest": tf.reduce_mean(inputs)}

        model.train_step = types.MethodType(train_step, model)
        return model

    def of_class(model: keras.Model) -> Callable[[Any], Any]:
        return lambda data: type(model).train_step(model, data)

    def script(batch: int) -> dict[str, Any]:
        first, second, third = before.pop(), made(), made()
        outcomes = {}
        for model in (first, doubled(second, second.train_step), doubled(third, of_class(third))):
            history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
            outcomes[f"{len(outcomes)}"] = outcome(model, history)
        return outcomes

    fresh()
    before = [doubled(model, of_class(model)) for model in (made(), made())]
    plain = script(size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    for name, one in plain.items():
        compare(one, ours[name])
