"""Loss scales, mixed precision, small floats."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import NotSynchronizedError
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    OwnStep,
    both,
    deterministic_weights,
    fed,
    fit_evaluate_predict,
    fresh,
    mlp,
    outcome,
    rows,
)


@feature
def loss_scale() -> None:
    simple(
        lambda: {
            "optimizer": keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=2
            )
        }
    )


@feature
def mixed_precision_scales_as_one() -> None:
    """float16 overflows on one rank only: all ranks skip the step and halve the scale."""
    x, y = rows("ragged")
    x[1] = 6.5e4  # one row, on one rank, where the first layer overflows

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(1e-3), "mse")
            model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
            return {"scale": float(model.optimizer.dynamic_scale), "iterations": int(model.optimizer.iterations)}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script)


@feature
def mixed_bfloat16() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            assert model.layers[0].compute_dtype == "bfloat16"
            model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
            return {"weights": model.get_weights()}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script, rtol=0.02)  # a rounding of bfloat16 is 0.004


@feature
def float8_layers() -> None:
    """Their scales come as gradients, but are maxima over the batch, not sums."""
    x, y = (a.astype("float32") for a in rows("ragged"))

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        model = mlp()
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    fresh()
    with kdist.scope(scale_lr="linear", warmup_epochs=1):  # while the rate rises, momentum is corrected
        assert np.isfinite(script(BATCH)["history"]["loss"]).all()
    both(script, rtol=1e-2)  # rounding to 8 bits turns the least difference into 1e-4; sums would be off by 2


@feature
def float32_smoke() -> None:
    in_float32(rtol=1e-5)


def in_float32(rtol: float) -> None:
    x, y = (a.astype("float32") for a in rows("ragged"))

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        model = mlp()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script, rtol=rtol)


@feature
def one_loss_that_two_optimizers_scale() -> None:
    """As the error of a loss that only one of them scales asks for."""

    class Two(OwnStep):
        def compile(self, first: Any, second: Any) -> None:
            super().compile(first, "mse")
            self.second = second

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                own = self.compute_loss(x, y, self(x))
                loss = self.second.scale_loss(self.optimizer.scale_loss(own))
            kernel, bias = self.trainable_weights
            of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
            self.optimizer.apply([of_kernel], [kernel])
            self.second.apply([of_bias], [bias])
            return {"loss": own}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Two()
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script)


@feature
def one_loss_scaled_for_two_optimizers_is_refused() -> None:
    class Two(OwnStep):
        def compile(self, first: Any, second: Any) -> None:
            super().compile(first, "mse")
            self.second = second

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x)))
            kernel, bias = self.trainable_weights
            of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
            self.optimizer.apply([of_kernel], [kernel])
            self.second.apply([of_bias], [bias])
            return {}

    x, y = rows("even")
    with kdist.scope():
        model = Two()
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        with pytest.raises(NotSynchronizedError, match="scale_loss"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
