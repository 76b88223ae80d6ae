"""The scaled learning rate: as one process whose rate is set by hand at every step, and never seen in the user's."""

from __future__ import annotations

import logging
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import StrategyError
from kdist.keras_hooks.optimizers import innermost
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.restarts.events import own_reports
from kdist.scaling import LearningRateRule, num_warmup_steps, warmup_multiplier
from kdist.state.session import session_of
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere
from tests.training.fidelity import BATCH, compare, fresh, mlp, of_the_chief, rows, size

RATE = 0.01


def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = rows("ragged")
    return np.concatenate([x] * 3), np.concatenate([y] * 3)


def steps_of_epoch() -> int:
    return -(-len(data()[0]) // (size() * BATCH))


class ByHand(keras.callbacks.Callback):
    """Sets the rate before each step, and corrects the momentum: what kdist promises to do."""

    def __init__(self, factor: float, warmup_steps: float) -> None:
        super().__init__()
        self._factor, self._warmup_steps, self._step = factor, warmup_steps, 0
        self.ends: list[float] = []

    def _multiplier(self, step: int) -> float:
        return warmup_multiplier(step, self._factor, self._warmup_steps)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = innermost(self.model.optimizer)
        step = int(optimizer._iterations)  # one that is left out, for its gradients are not finite, is not counted
        now, before = self._multiplier(step), self._multiplier(self._step)
        optimizer.learning_rate = RATE * now
        if type(optimizer).__name__ == "SGD" and optimizer.momentum and step:
            for velocity in optimizer.momentums:
                velocity.assign(np.asarray(velocity) * (now / before))
        self._step = step

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(RATE * self._multiplier(int(innermost(self.model.optimizer)._iterations)))


def outcome(model: keras.Model) -> dict[str, Any]:
    skipped = ("learning_rate",)
    return {
        "weights": [np.asarray(v) for v in model.weights],
        "slots": [np.asarray(v) for v in model.optimizer.variables if v.name not in skipped],
    }


def scaled_as_by_hand(
    make: Any, factor: float, *, epochs: int = 4, warmup: Any = 1.5, spoilt: int | None = None, **scope: Any
) -> None:
    x, y = data()
    if spoilt is not None:
        y[spoilt] = np.nan

    def by_hand() -> dict[str, Any]:
        plain, callback = mlp(), ByHand(factor, num_warmup_steps(warmup, epochs, steps_of_epoch()))
        plain.compile(make(), "mse")
        plain.fit(x, y, batch_size=size() * BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
        return {"outcome": outcome(plain), "ends": callback.ends}

    expected = of_the_chief(by_hand)
    fresh()
    with kdist.scope(warmup_epochs=warmup, **scope):
        model = mlp()
        model.compile(make(), "mse")
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    compare(expected["outcome"], outcome(model), rtol=1e-6)  # the multiplier is a float32
    np.testing.assert_allclose(float(model.optimizer.learning_rate), RATE, rtol=1e-7)
    effective = history.history["effective_learning_rate"]
    np.testing.assert_allclose(effective, expected["ends"], rtol=1e-6)
    np.testing.assert_allclose(effective[-1], RATE * factor, rtol=1e-6)
    assert_equal_everywhere(effective)


def sgd_linear() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE), float(size()))


def momentum_linear_with_correction() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE, momentum=0.9), float(size()))


def nesterov_linear_with_correction() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True), float(size()), warmup="auto")


def momentum_while_gradients_accumulate() -> None:
    """The warm-up counts steps, of which several make an update; an update's velocity holds the last update's rate."""
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE, momentum=0.9, gradient_accumulation_steps=4), float(size()))


def momentum_where_updates_are_left_out() -> None:
    """A step whose gradients are not finite changes nothing, velocities neither."""

    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE, momentum=0.9))

    scaled_as_by_hand(make, float(size()), spoilt=2 * size() * BATCH)


def a_schedule_goes_on_in_steps_while_gradients_accumulate() -> None:
    """On another number of ranks: the schedule where it was, the warm-up as far as it was."""
    schedule = keras.optimizers.schedules.PolynomialDecay(RATE, 100, 0.0)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=4)
    optimizer.build(mlp().trainable_variables)
    of_two = EffectiveRate(optimizer, LearningRateRule(2.0, "linear", "2 ranks"), 2.0)
    of_two.set_warmup(10)
    optimizer._iterations.assign(6)
    np.testing.assert_allclose(of_two.effective(), float(schedule(12)) * 1.6, rtol=1e-6)
    for is_known in (True, False):  # the length of an epoch
        of_four = EffectiveRate(optimizer, LearningRateRule(4.0, "linear", "4 ranks"), 4.0)
        of_four.resume(of_two.progress())
        if is_known:
            of_four.set_warmup(5)
        else:
            of_four.continue_warmup()
        np.testing.assert_allclose(of_four.effective(), float(schedule(12)) * (1 + 3 * 0.6), rtol=1e-6)


def adam_sqrt() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.Adam(RATE), math.sqrt(size()))


def rules_by_name() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.Adam(RATE), float(size()), scale_lr="linear", epochs=2)
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE), math.sqrt(size()), scale_lr="sqrt", epochs=2)


def a_number_and_no_warmup() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.RMSprop(RATE), 2.5, scale_lr=2.5, warmup=0, epochs=2)


def left_alone() -> None:
    """`None`, and a batch that does not grow: the user's rate, and nothing in the logs."""
    x, y = data()
    for scope in ({"scale_lr": None}, {"scale_batch": False}):
        fresh()
        with kdist.scope(**scope):
            model = mlp()
            model.compile(keras.optimizers.SGD(RATE), "mse")
            history = model.fit(x, y, batch_size=BATCH, verbose=0)
        assert "effective_learning_rate" not in history.history
        assert model._kdist.rates()[0].rule.factor == 1.0


class MyOptimizer(keras.optimizers.SGD):
    """A rule of one's own."""


def unknown_optimizers_are_left_alone_with_one_warning() -> None:
    x, y = data()
    fresh()
    with logged(logging.WARNING) as warnings, kdist.scope():
        model = mlp()
        model.compile(MyOptimizer(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        history = model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(warnings) == (1 if kdist.is_chief() else 0), warnings
    if warnings:
        assert "MyOptimizer" in warnings[0]
    assert "effective_learning_rate" not in history.history


def the_report_says_old_new_rule_and_why() -> None:
    x, y = data()
    fresh()
    with logged() as lines, kdist.scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        before = len(lines)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        again = mlp()
        again.compile(keras.optimizers.SGD(RATE), "mse")
        again.fit(x, y, batch_size=BATCH, verbose=0)
        assert len(lines) == before, lines  # the same settings say nothing again
    said = "\n".join(lines)
    if kdist.is_chief():
        rate = f"learning rate of SGD: {RATE} x {size()} = {RATE * size():g} by the linear rule"
        batch = f"batch: {BATCH} x {size()} ranks = {BATCH * size()}"
        for words in (f"{rate}, after a warm-up of ", batch, f"{size()} ranks"):
            assert words in said, (words, said)
        assert max(map(len, lines)) < 120, lines
        assert "larger global batch" not in said
    else:
        assert not said
    with logged(logging.DEBUG) as lines, kdist.scope():
        again = mlp()
        again.compile(keras.optimizers.SGD(RATE), "mse")
        again.fit(x, y, batch_size=BATCH, verbose=0)
    if kdist.is_chief():
        assert any("larger global batch" in line and "save_freq" in line for line in lines), lines


def a_global_batch_that_may_change_is_warned_of() -> None:
    """Once, by the chief of a job whose number of ranks may change."""
    x, y = data()
    ways: tuple[tuple[bool, dict[str, Any]], ...] = (
        (True, {}),
        (True, {"scale_batch": False}),
        (True, {"micro_batches": 3}),
        (False, {}),
    )
    for is_resized, scope in ways:
        fresh()
        own_reports.is_resized = is_resized
        try:
            with logged(logging.WARNING) as lines, kdist.scope(**scope):
                for _ in range(2):
                    model = mlp()
                    model.compile(keras.optimizers.SGD(RATE), "mse")
                    model.fit(x, y, batch_size=BATCH, verbose=0)
        finally:
            own_reports.is_resized = False
        warnings = [line for line in lines if f"kdist.scope(micro_batches={size()})" in line]
        assert len(warnings) == (is_resized and not scope and kdist.is_chief()), lines


class TwoOptimizers(keras.Model):
    """As a GAN has: each updates a part of the weights, and the compiled one none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="second")
        self.one = keras.optimizers.SGD(RATE, name="one")
        self.other = keras.optimizers.Adam(RATE, name="other")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x)
            targets = tf.reshape(y, (tf.shape(x)[0], -1))[:, :1]
            loss = tf.reduce_mean((predicted - tf.cast(targets, predicted.dtype)) ** 2)
        for layer, optimizer in ((self.first, self.one), (self.second, self.other)):
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, [each.value for each in variables]), variables)
        return {"loss": loss}


def only_optimizers_that_update_are_reported() -> None:
    x, y = data()
    fresh()
    with logged() as lines, kdist.scope(warmup_epochs=0):
        model = TwoOptimizers()
        model.compile()  # Keras' default, RMSprop, which makes no step
        history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    names = [line.split(":")[0] for line in lines if line.startswith("learning rate of")]
    assert names == (["learning rate of SGD", "learning rate of Adam"] if kdist.is_chief() else []), lines
    np.testing.assert_allclose(history["effective_learning_rate_one"], [RATE * size()], rtol=1e-6)
    np.testing.assert_allclose(history["effective_learning_rate_other"], [RATE * size() ** 0.5], rtol=1e-6)
    assert "effective_learning_rate" not in history


def a_second_fit_does_not_warm_up_again() -> None:
    """Nor does a recompiled metric; the multiplier goes on from where `optimizer.iterations` is."""
    x, y = data()
    fresh()
    with kdist.scope(warmup_epochs=1):
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
        rate = model._kdist.rates()[0]
        np.testing.assert_allclose(rate.effective(), RATE * size(), rtol=1e-6)
        history = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
        np.testing.assert_allclose(history.history["effective_learning_rate"], [RATE * size()], rtol=1e-6)
        model.compile(model.optimizer, "mae")
        history = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
        np.testing.assert_allclose(history.history["effective_learning_rate"], [RATE * size()], rtol=1e-6)


def warmup_of_data_whose_steps_are_unknown() -> None:
    """Known when the first epoch is over: the rate rises from there, and does not jump."""
    import tensorflow as tf

    x, y = data()
    fresh()
    with kdist.scope(warmup_epochs=2):
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).filter(lambda *_: True)
        history = model.fit(dataset, epochs=4, verbose=0)
    effective = assert_equal_everywhere(history.history["effective_learning_rate"])
    np.testing.assert_allclose(effective, [RATE, RATE * (1 + size()) / 2, *[RATE * size()] * 2], rtol=1e-6)
    fresh()
    with kdist.scope(warmup_epochs=0):  # none is none
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        history = model.fit(dataset, epochs=2, verbose=0)
    np.testing.assert_allclose(history.history["effective_learning_rate"], [RATE * size()] * 2, rtol=1e-6)


def one_factor_for_several_rates_is_refused() -> None:
    parts = keras.optimizers.SGD(RATE), keras.optimizers.SGD(RATE)
    with kdist.scope(scale_lr="linear"):
        model = mlp()
        model.compile(keras.optimizers.MultiOptimizer(lambda variable: parts["bias" in variable.path]), "mse")
        with pytest.raises(StrategyError, match="a MultiOptimizer"):
            model.fit(*data(), verbose=0)


def schedules_are_stretched() -> None:
    """N times fewer steps an epoch, but for the last: a schedule still ends with the run. Its values are multiplied."""
    batches = size() + 1
    x, y = (each[: batches * BATCH] for each in data())
    stretch = batches / 2

    def schedule() -> keras.optimizers.schedules.LearningRateSchedule:
        return keras.optimizers.schedules.PolynomialDecay(RATE, 4 * batches, 0.001)

    class SetByHand(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            optimizer.learning_rate = size() * float(schedule()(int(int(optimizer.iterations) * stretch)))

    fresh()
    plain = mlp()
    plain.compile(keras.optimizers.SGD(RATE), "mse")
    plain.fit(x, y, batch_size=size() * BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[SetByHand()])
    fresh()
    with kdist.scope(warmup_epochs=0):
        model = mlp()
        model.compile(keras.optimizers.SGD(schedule()), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    compare({"weights": plain.get_weights()}, {"weights": model.get_weights()}, rtol=1e-6)
    assert isinstance(model.optimizer._learning_rate, keras.optimizers.schedules.PolynomialDecay)


def a_schedule_of_unknown_steps_is_told_of() -> None:
    x, y = data()
    with logged() as lines, kdist.scope(warmup_epochs=0):
        model = mlp()
        model.compile(keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(RATE, 1000, 0.001)), "mse")
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(10)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    told = [line for line in lines if "goes on from steps that this job has not made" in line]
    assert len(told) == (kdist.is_chief() and size() > 1), lines
    batches = -(-len(x) // BATCH)
    stretch = batches / steps_of_epoch()
    assert not told or f"10 steps, as from a file, each of which counts as {stretch:g} of yours" in told[0]
    rate = session_of(model).effective_rates.get(model.optimizer)
    assert rate.effective() == pytest.approx(
        size() * float(model.optimizer._learning_rate(int(10 * stretch + batches)))
    )


def an_epoch_of_fewer_batches_than_ranks_grows_no_more() -> None:
    """The rows of one batch are split: the global batch is the user's, until a `fit` has more of them."""
    x, y = rows("even")
    few = max(1, size() - 1)

    def trained(batch: int, rate: float) -> keras.Model:
        model = mlp()
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
        model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
        return model

    for batches in {1, few}:
        fresh()
        plain = trained(len(x), batches * RATE)
        fresh()
        with logged() as lines, kdist.scope(warmup_epochs=0):
            model = trained(-(-len(x) // batches), RATE)
            compare({"weights": plain.get_weights()}, {"weights": model.get_weights()}, rtol=1e-6)
            assert model.history.history.get("effective_learning_rate", [RATE])[-1] == pytest.approx(batches * RATE)
            model.fit(x, y, batch_size=BATCH, verbose=0)
        assert model.history.history["effective_learning_rate"][-1] == pytest.approx(size() * RATE)
        if kdist.is_chief():
            batch = -(-len(x) // batches)
            told = f"{batch} x {batches} = {batch * batches}, split over {size()} ranks: an epoch has {batches} batch"
            assert any(told in line for line in lines), lines


def whole_batches_that_are_fewer_than_ranks_are_not_split() -> None:
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x[:BATCH], y[:BATCH])).batch(BATCH)
    with logged() as lines, kdist.scope(warmup_epochs=0):
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(dataset, verbose=0)
    told = f"batch: 1 of yours on {size()} ranks: an epoch has 1 batch"
    assert not kdist.is_chief() or any(line == told for line in lines), lines


def a_first_fit_of_few_batches_leaves_the_warmup_to_the_next() -> None:
    """It is not scaled: what is scaled begins slowly, and is told of."""
    x, y = data()
    read: list[float] = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            read.append(session_of(self.model).rates()[0].effective())

    fresh()
    with logged() as lines, kdist.scope(warmup_epochs=1):
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        history = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Reads()])
    assert read[0] == pytest.approx(RATE)
    assert history.history["effective_learning_rate"] == pytest.approx([size() * RATE])
    told = [line for line in lines if line.startswith("learning rate of SGD")]
    expected = ["unchanged", f"{RATE:g} x {size()}"] if kdist.is_chief() else []
    assert len(told) == len(expected), lines
    assert all(part in line for part, line in zip(expected, told, strict=True)), lines


def a_rate_that_is_made_within_a_fit_knows_its_data() -> None:
    """Of an optimizer that `build` makes, which Keras calls for the first batch."""

    class Late(TwoOptimizers):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.one = keras.optimizers.SGD(RATE, name="one")

    x, y = data()
    with kdist.scope(scale_lr="linear", warmup_epochs=0):
        model = Late()
        model.compile()
        model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        assert session_of(model).rate_of(model.one).effective() == pytest.approx(RATE)


def rates_keep_their_keys_in_the_logs() -> None:
    """Also with a callback that scales, where the second optimizer begins in the second epoch."""

    class Late(TwoOptimizers):
        def train_step(self, batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(batch[0]) ** 2)
            layers = [self.first, self.second][: 1 + (int(self.one.iterations) >= steps_of_epoch())]
            sources = [[each.value for each in layer.trainable_variables] for layer in layers]
            optimizers = (self.one, self.other)
            for layer, optimizer, gradients in zip(layers, optimizers, tape.gradient(loss, sources), strict=False):
                optimizer.apply(gradients, layer.trainable_variables)
            return {"loss": loss}

    x, y = data()
    schedule = kdist.callbacks.LearningRateSchedule({0: 0.5})
    with kdist.scope(scale_lr="linear", warmup_epochs=0):
        model = Late()
        model.compile(run_eagerly=True)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[schedule]).history
    names = sorted(name for name in history if name.startswith("effective"))
    assert names == ["effective_learning_rate", "effective_learning_rate_other"], names
    np.testing.assert_allclose(history["effective_learning_rate"], [0.5 * size() * RATE] * 2, rtol=1e-6)
    np.testing.assert_allclose(history["effective_learning_rate_other"], [0.5 * size() * RATE], rtol=1e-6)


def a_schedule_reads_the_users_steps_in_train_on_batch() -> None:
    """A batch that is split is one of the user's steps, before a `fit`, after it, and between two."""
    schedule = keras.optimizers.schedules.PolynomialDecay(RATE, 200, 0.001)
    x, y = (each[: (size() + 1) * BATCH] for each in data())
    one = slice(BATCH)
    with kdist.scope(scale_lr=1.0, warmup_epochs=0):
        model = mlp()
        model.compile(keras.optimizers.SGD(schedule), "mse")
        rate, steps = session_of(model).rate_of(model.optimizer), 0
        for _ in range(2):
            for _ in range(3):
                model.train_on_batch(x[one], y[one])
                steps += 1
                assert rate.effective() == pytest.approx(float(schedule(steps)), rel=1e-6)
            model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0)
            steps += 4 * (size() + 1)
            assert rate.effective() == pytest.approx(float(schedule(steps)), rel=1e-6)
        before = model.get_weights()
        model.train_on_batch(x[one], y[one])
        after = model.get_weights()
        model.optimizer.iterations.assign(0)
        model.train_on_batch(x[one], y[one])
        assert rate.effective() == pytest.approx(float(schedule(1)), rel=1e-6)
        model = mlp()
        model.compile(keras.optimizers.SGD(schedule), "mse")
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(100)  # as of a file
        model.train_on_batch(x[one], y[one])
        assert session_of(model).rate_of(model.optimizer).effective() == pytest.approx(float(schedule(101)), rel=1e-6)

    def plain_step() -> list[np.ndarray]:
        plain = mlp()
        plain.compile(keras.optimizers.SGD(float(schedule(steps))), "mse")
        plain.set_weights(before)
        plain.train_on_batch(x[one], y[one])
        return plain.get_weights()

    compare({"weights": of_the_chief(plain_step)}, {"weights": after}, rtol=1e-6)


def a_stretched_schedule_is_at_the_users_step_at_each_epochs_end() -> None:
    """Also where the quotient of batches and steps is rounded down, as 14 / 5 is: 45 steps of it are 126 - 1e-14."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([125.5], [1.0, 0.5])
    optimizer = keras.optimizers.SGD(schedule)
    optimizer.build(mlp().trainable_variables)
    rate = EffectiveRate(optimizer, LearningRateRule(1.0, "fixed", "none"), 14 / 5)
    optimizer._iterations.assign(45)
    assert 45 * (14 / 5) < 126
    assert rate.effective() == 0.5


def a_fit_in_a_callback_has_a_rate_of_its_own() -> None:
    """One batch in the inner `fit`; the outer one goes on with its own rate and schedule."""
    x, y = data()
    read: list[float] = []

    class Fits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            history = self.model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
            read.append(history.history.get("effective_learning_rate", [RATE])[-1])

    with kdist.scope(scale_lr="linear", warmup_epochs=0):
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Fits()])
    np.testing.assert_allclose(read, [RATE] * 3, rtol=1e-6)
    np.testing.assert_allclose(history.history["effective_learning_rate"], [size() * RATE] * 3, rtol=1e-6)


def a_schedule_that_is_set_back_begins_anew() -> None:
    """Also after data with other numbers of batches, and where the chief alone has loaded a file of more steps."""
    schedule = keras.optimizers.schedules.PolynomialDecay(RATE, 1000, 0.001)
    x, y = data()
    few, many = slice((size() + 1) * BATCH), slice(2 * size() * BATCH)
    with kdist.scope(scale_lr=1.0, warmup_epochs=0):
        model = mlp()
        model.compile(keras.optimizers.SGD(schedule), "mse")
        model.fit(x[few], y[few], batch_size=BATCH, epochs=10, verbose=0)
        rate = session_of(model).effective_rates.get(model.optimizer)
        assert rate.effective() == pytest.approx(float(schedule(10 * (size() + 1))))
        model.fit(x[many], y[many], batch_size=BATCH, verbose=0)
        assert rate.effective() == pytest.approx(float(schedule(10 * (size() + 1) + 2 * size())))
        if kdist.is_chief():
            model.optimizer.iterations.assign(0)
        model.fit(x[few], y[few], batch_size=BATCH, verbose=0)
        assert rate.effective() == pytest.approx(float(schedule(size() + 1)))
        assert_equal_everywhere([rate.effective()])
        model.fit(x[many], y[many], batch_size=BATCH, epochs=5, verbose=0)

        def restart(epoch: int, logs: Any) -> None:
            if epoch == 1:
                model.optimizer.iterations.assign(0)

        callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=restart)]
        model.fit(x[few], y[few], batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        assert rate.effective() == pytest.approx(float(schedule(size() + 1)))


def the_users_rate_is_read_and_set_unscaled() -> None:
    x, y = data()
    fresh()
    read: list[float] = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            read.append(round(float(self.model.optimizer.learning_rate), 9))

    with kdist.scope(scale_lr=3.0, warmup_epochs=1):
        model = mlp()
        model.compile(keras.optimizers.Adam(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Reads()])
        model.optimizer.learning_rate = 0.5 * RATE
        history = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Reads()])
    half = len(read) // 2
    assert read == [RATE] * half + [0.5 * RATE] * half
    np.testing.assert_allclose(history.history["effective_learning_rate"], [1.5 * RATE], rtol=1e-6)


CASES = {
    function.__name__: function
    for function in (
        sgd_linear,
        momentum_linear_with_correction,
        nesterov_linear_with_correction,
        momentum_while_gradients_accumulate,
        momentum_where_updates_are_left_out,
        a_schedule_goes_on_in_steps_while_gradients_accumulate,
        adam_sqrt,
        rules_by_name,
        a_number_and_no_warmup,
        left_alone,
        unknown_optimizers_are_left_alone_with_one_warning,
        the_report_says_old_new_rule_and_why,
        a_global_batch_that_may_change_is_warned_of,
        only_optimizers_that_update_are_reported,
        a_second_fit_does_not_warm_up_again,
        warmup_of_data_whose_steps_are_unknown,
        one_factor_for_several_rates_is_refused,
        schedules_are_stretched,
        a_schedule_of_unknown_steps_is_told_of,
        an_epoch_of_fewer_batches_than_ranks_grows_no_more,
        whole_batches_that_are_fewer_than_ranks_are_not_split,
        a_first_fit_of_few_batches_leaves_the_warmup_to_the_next,
        a_rate_that_is_made_within_a_fit_knows_its_data,
        rates_keep_their_keys_in_the_logs,
        a_schedule_reads_the_users_steps_in_train_on_batch,
        a_stretched_schedule_is_at_the_users_step_at_each_epochs_end,
        a_fit_in_a_callback_has_a_rate_of_its_own,
        a_schedule_that_is_set_back_begins_anew,
        the_users_rate_is_read_and_set_unscaled,
    )
}
