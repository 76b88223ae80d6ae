"""What looks into the step: NaNPolicy and Throughput, each with a rank that fails or is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import NaNPolicy, Throughput
from kdist.errors import NotFiniteError
from tests.callbacks.alone import engine, own_loop
from tests.callbacks.cases_state import state_of
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere, everyone
from tests.training.fidelity import (
    BATCH,
    Batches,
    compare,
    deterministic_weights,
    fresh,
    mlp,
    of_the_chief,
    outcome,
    size,
)

STEPS = 6

# NaNPolicy.


def rows(batch: int, bad_steps: tuple[int, ...] = (), value: float = np.nan) -> tuple[Any, Any]:
    """Returns rows for six steps; of some steps, a row of the last rank's share is not finite."""
    generator = np.random.default_rng(7)
    n = STEPS * size() * BATCH
    x = generator.normal(size=(n, 5))
    y = generator.normal(size=(n, 2))
    for step in bad_steps:
        x[(step + 1) * size() * BATCH - 1] = value
    return x, y


def without(steps: tuple[int, ...], *arrays: Any) -> list[Any]:
    """Returns arrays without the rows of some steps."""
    kept = np.isin(np.arange(len(arrays[0])) // (size() * BATCH), steps, invert=True)
    return [array[kept] for array in arrays]


def normalised(optimizer: Any = "adam", **kwargs: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(2),
        ]
    )
    deterministic_weights(model)
    model.compile(optimizer, "mse", metrics=["mae"], **kwargs)
    return model


def a_nan_of_one_rank_is_raised_on_all() -> None:
    fresh()
    x, y = rows(BATCH, (3,))
    with kdist.scope(scale_lr=None):
        model = normalised()
        with pytest.raises(NotFiniteError) as raised:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[NaNPolicy()])
    message = assert_equal_everywhere(str(raised.value))
    assert "Training step 3 is not finite" in message, message
    assert f"on rank {size() - 1} its data, a loss of nan, a gradient of 'sequential/dense/kernel'" in message, message
    assert "on rank 0" not in message or size() == 1, message
    assert int(model.optimizer.iterations) == 4  # the step was made, and no other
    assert "_kdist_step_extensions" not in model.__dict__


class Root(keras.layers.Layer):
    """The root of its input: at 0 its value is finite, and its gradient is not."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return keras.ops.sqrt(inputs * self.scale)


def a_gradient_that_is_not_finite_is_named() -> None:
    """The loss is finite on all ranks; two ranks of three are to blame."""
    fresh()
    x, y = np.ones((size() * BATCH, 1)), np.ones((size() * BATCH, 1))
    x[BATCH:] = 0.0
    with kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((1,)), Root(name="root"), keras.layers.Dense(1, name="after")])
        model.compile("sgd", "mse")
        with pytest.raises(NotFiniteError) as raised:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[NaNPolicy()])
    message = assert_equal_everywhere(str(raised.value))
    expected = "; ".join(f"on rank {rank} a gradient of {model.layers[0].scale.path!r}" for rank in range(1, size()))
    assert expected in message, message
    assert "loss of" not in message


def skipped(make: Callable[[], keras.Model], bad: tuple[int, ...], *, value: float = np.nan, **fit: Any) -> Any:
    """Asserts that a training that leaves steps out is one without their rows, state and logs; returns its model."""

    def train(model: keras.Model, x: Any, y: Any, batch: int, *callbacks: Any) -> dict[str, Any]:
        history = model.fit(
            x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks), **fit
        )
        counts = history.history.pop("skipped_steps", [len(bad)] * 2)
        assert counts == [len(bad)] * 2, counts
        return outcome(model, history)

    x, y = rows(BATCH, bad, value)
    plain = of_the_chief(lambda: train(make(), *without(bad, x, y), size() * BATCH))
    fresh()
    with kdist.scope(scale_lr=None), logged(logging.WARNING) as lines:
        model = make()
        ours = train(model, x, y, BATCH, NaNPolicy("skip"))
    compare(plain, ours, rtol=1e-8)
    assert [len(said) for said in everyone(lines)] == [2 * len(bad)] + [0] * (size() - 1)
    if lines:
        assert f"on rank {size() - 1} its data, a loss of" in lines[0], lines
        assert "skipped on all ranks" in lines[0]
    return model


def skipped_steps_are_as_if_they_had_not_been() -> None:
    """Weights, slots, iterations, statistics, metrics."""
    skipped(normalised, (1, 4))
    skipped(lambda: normalised("sgd"), (0, STEPS - 1), value=np.inf)


def skipping_with_accumulation_and_momentum() -> None:
    def make() -> keras.Model:
        return normalised(keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2))

    skipped(make, (2, 3))


def skipping_within_an_execution_of_several_steps() -> None:
    skipped(lambda: normalised(steps_per_execution=3), (1, 5))


def skipping_in_eager_steps() -> None:
    skipped(lambda: normalised(run_eagerly=True), (2,))


class TwoOptimizers(keras.Model):
    """Updates its two layers one after the other, by optimizers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = keras.layers.Dense(4), keras.layers.Dense(2)
        self.second = keras.optimizers.Adam(0.01)
        self.build((None, 5))

    def build(self, shape: Any) -> None:
        self.one.build(shape)
        self.other.build((None, 4))
        deterministic_weights(self)

    def call(self, inputs: Any) -> Any:
        return self.other(self.one(inputs))

    def train_step(self, data: Any) -> Any:
        x, y = data
        for layer, optimizer, limit in ((self.one, self.optimizer, 1.0), (self.other, self.second, np.inf)):
            with tf.GradientTape() as tape:
                # The first update is finite in every step, and the second is not.
                loss = self.compute_loss(x=x, y=y, y_pred=self(tf.where(tf.math.is_finite(x), x, limit)))
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


def skipping_takes_back_what_another_optimizer_did() -> None:
    def make() -> keras.Model:
        model = TwoOptimizers()
        model.compile("adam", "mse")
        return model

    x, y = rows(BATCH, (2,), np.inf)
    fresh()
    plain = make()
    plain.fit(*without((2,), x, y), batch_size=size() * BATCH, shuffle=False, verbose=0)
    fresh()
    with kdist.scope(scale_lr=None):
        ours = make()
        ours.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[NaNPolicy("skip")])
    compare({"weights": plain.get_weights()}, {"weights": ours.get_weights()}, rtol=1e-8)
    assert int(ours.optimizer.iterations) == int(ours.second.iterations) == STEPS - 1


class Accumulates(keras.Model):
    """Adds up the gradients of two steps by hand, and updates in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.sums = [
            self.add_weight(shape=each.shape, initializer="zeros", trainable=False)
            for each in self.net.trainable_variables
        ]
        self.num_steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        self.num_steps.assign_add(1)
        tf.cond(self.num_steps % 2 == 0, self.update, lambda: None)
        return {"loss": loss}

    def update(self) -> None:
        self.optimizer.apply([each.value for each in self.sums], self.trainable_variables)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def skipping_where_a_branch_updates() -> None:
    def make() -> keras.Model:
        model = Accumulates()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    skipped(make, (1, 2))  # in an even number of others


def overflow_is_the_loss_scales_own_affair() -> None:
    """It leaves steps out by itself and lowers its scale; a NaN in the data is reported all the same."""
    fresh()
    keras.config.set_floatx("float32")
    x, y = rows(BATCH)
    with kdist.scope(scale_lr=None):
        inner = keras.optimizers.SGD(0.01)
        model = normalised(keras.optimizers.LossScaleOptimizer(inner, initial_scale=3e38))
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[NaNPolicy()])
        assert int(inner.iterations) < 2 * STEPS
        assert float(model.optimizer.dynamic_scale) < 3e38
        x[-1] = np.nan
        with pytest.raises(NotFiniteError, match=f"on rank {size() - 1} its data, a loss of nan"):
            model.fit(x, y, batch_size=BATCH, epochs=9, shuffle=False, verbose=0, callbacks=[NaNPolicy()])


def a_loss_alone_is_noticed_at_the_end_of_the_epoch() -> None:
    fresh()
    x, y = rows(BATCH)

    def loss(y: Any, predicted: Any) -> Any:
        value = keras.losses.mean_squared_error(y, predicted)
        return value + tf.stop_gradient(value * np.nan)

    with kdist.scope(scale_lr=None):
        model = normalised("sgd")
        model.compile("sgd", loss)
        with pytest.raises(NotFiniteError, match="the loss of epoch 0 is nan"):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[NaNPolicy()])


def a_learning_rate_set_in_a_skipped_step_is_kept() -> None:
    fresh()
    x, y = rows(BATCH, (3,))

    def halve(batch: int, logs: Any) -> None:
        if batch == 2 and kdist.rank() == size() - 1:
            model.optimizer.learning_rate = 0.125

    with kdist.scope(scale_lr=None):
        model = normalised(keras.optimizers.SGD(0.25))
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=halve), NaNPolicy("skip")]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert assert_equal_everywhere(float(model.optimizer.learning_rate)) == 0.125


def without_a_scope() -> None:
    """Each rank has rows of its own; the last one's third step is not finite."""
    generator = np.random.default_rng(kdist.rank())
    x, y = generator.normal(size=(STEPS * BATCH, 5)), generator.normal(size=(STEPS * BATCH, 2))
    bad = x.copy()
    if kdist.rank() == size() - 1:
        bad[2 * BATCH] = np.nan
    keep = np.arange(len(x)) // BATCH != 2
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fresh()
    plain = own_loop("adam")
    plain.fit(x[keep], y[keep], **arguments)
    fresh()
    model = own_loop("adam")
    model.fit(bad, y, **arguments, callbacks=[NaNPolicy("skip", engine=engine())])
    compare({"state": state_of(plain)}, {"state": state_of(model)})
    assert model.history.history["skipped_steps"] == [1]
    assert model.history.history["loss"] == pytest.approx(plain.history.history["loss"])
    with pytest.raises(NotFiniteError, match=f"step 7 .*on rank {size() - 1} its data, a loss of nan"):
        model.fit(bad, y, **arguments, callbacks=[NaNPolicy(engine=engine())])


# Throughput.

PAUSE = 0.5  # seconds: a busy machine makes ranks wait by itself, but not for so long


class Slow(keras.callbacks.Callback):
    """Takes long over each step, on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if kdist.rank() == self._rank:
            time.sleep(PAUSE)


class SlowBatches(Batches):
    """Takes long over each batch, on one rank."""

    slow_rank = -1

    def __getitem__(self, index: int) -> Any:
        if kdist.rank() == self.slow_rank:
            time.sleep(PAUSE)
        return super().__getitem__(index)


def measured(*slow: keras.callbacks.Callback, slow_input: int = -1, alone: bool = False, epochs: int = 1) -> Throughput:
    """Trains epochs of six steps, and returns what was measured, having compared the logs."""
    fresh()
    arrays = rows(BATCH)
    if alone:
        throughput, model = Throughput(engine=engine()), own_loop()
        arrays = tuple(array[: STEPS * BATCH] for array in arrays)
    else:
        throughput = Throughput()
        with kdist.scope(scale_lr=None):
            model = mlp()  # with one message a step: on a busy machine each one costs
            model.compile("sgd", "mse")
    batches = SlowBatches(arrays, BATCH)
    batches.slow_rank = slow_input
    history = model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[throughput, *slow]).history
    history.pop("loss", None)
    logs = assert_equal_everywhere(history)
    for epoch in range(epochs):
        for rank in range(size()):
            shares = [logs[f"{name}_rank_{rank}"][epoch] for name in ("input", "compute", "waiting")]
            assert sum(shares) == pytest.approx(1)
            assert min(shares) >= 0
        assert logs["samples_per_second"][epoch] > 0
    assert throughput.slowest == tuple(assert_equal_everywhere(throughput.slowest))
    return throughput


def a_rank_slow_in_its_steps_is_named() -> None:
    for alone, ranks in ((False, range(size())), (True, [0])):
        for rank in ranks:
            throughput = measured(Slow(rank), alone=alone)
            assert throughput.slowest == (rank, "slow compute"), [alone, rank, throughput._totals]


def a_rank_slow_in_its_input_is_named() -> None:
    for alone in (False, True):
        # While the first epoch's step is traced, its data is drawn ahead.
        throughput = measured(slow_input=size() - 1, alone=alone, epochs=2)
        assert throughput.slowest == (size() - 1, "input-bound"), [alone, throughput._totals]


def what_is_counted_is_right_in_an_execution_of_several_steps() -> None:
    fresh()
    x, y = rows(BATCH)
    with kdist.scope(scale_lr=None):
        model = normalised("sgd", steps_per_execution=3)
        throughput = Throughput(per_rank=False)
        history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[throughput]).history
    assert "input_rank_0" not in history
    # The first execution is traced, and left out.
    num_steps = 3 * STEPS - 3
    assert [times.rows for times in throughput._totals] == [num_steps * BATCH] * size()
    with kdist.scope(scale_lr=None):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert "_kdist_step_extensions" not in model.__dict__


CASES = {
    function.__name__: function
    for function in (
        a_nan_of_one_rank_is_raised_on_all,
        a_gradient_that_is_not_finite_is_named,
        skipped_steps_are_as_if_they_had_not_been,
        skipping_with_accumulation_and_momentum,
        skipping_within_an_execution_of_several_steps,
        skipping_in_eager_steps,
        skipping_takes_back_what_another_optimizer_did,
        skipping_where_a_branch_updates,
        overflow_is_the_loss_scales_own_affair,
        a_loss_alone_is_noticed_at_the_end_of_the_epoch,
        a_learning_rate_set_in_a_skipped_step_is_kept,
        without_a_scope,
        a_rank_slow_in_its_steps_is_named,
        a_rank_slow_in_its_input_is_named,
        what_is_counted_is_right_in_an_execution_of_several_steps,
    )
}
