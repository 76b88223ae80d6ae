"""LearningRateSchedule and LearningRateWarmup: the rates that updates really take."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import LearningRateSchedule, LearningRateWarmup
from kdist.errors import DataError, ScopeError
from tests.training.behaviours import assert_equal_everywhere
from tests.training.behaviours_scaling import RATE, TwoOptimizers
from tests.training.fidelity import BATCH, both, compare, fed, fresh, mlp, outcome, rows, size

ROWS = 6 * BATCH  # of each rank: six steps an epoch
STEPS = 6


class Noting(keras.optimizers.SGD):
    """SGD that notes the rate of each update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[float] = []

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self._get_variable_index(variable) == 0:
            tf.numpy_function(lambda rate: self.rates.append(float(rate)), [learning_rate], [])
        super().update_step(gradient, variable, learning_rate)


def noting(rate: Any = 0.5, **kwargs: Any) -> keras.Model:
    model = mlp()
    model.compile(Noting(rate, **kwargs), "mse")
    return model


def train(model: keras.Model, *callbacks: Any, num_steps: int = STEPS, **kwargs: Any) -> list[float]:
    """Trains in the scope or out of it, and returns the rates of this call's updates."""
    n = num_steps * BATCH * (size() if "_kdist" in model.__dict__ else 1)
    x, y = np.ones((n, 5)), np.ones((n, 2))
    before = len(model.optimizer.rates)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=list(callbacks), **kwargs)
    return model.optimizer.rates[before:]


def by_formula(multiplier: Any, epochs: range, rate: float = 0.5, num_steps: int = STEPS) -> list[float]:
    return [rate * multiplier(epoch + step / num_steps) for epoch in epochs for step in range(num_steps)]


def assert_rates(rates: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(assert_equal_everywhere(rates), expected, rtol=1e-6)


def in_every_way(script: Any) -> None:
    """Runs a script with a model in the scope, and with one that each rank trains for itself."""
    fresh()
    with kdist.scope(scale_lr=None):
        script(noting)
    fresh()
    script(noting)


def piecewise_and_smooth_multipliers() -> None:
    def script(make: Any) -> None:
        steps = LearningRateSchedule({1: 0.1, 1.5: 0.01, 2: 0.001})
        expected = [0.5] * 6 + [0.05] * 3 + [0.005] * 3 + [0.0005] * 6
        assert_rates(train(make(), steps, epochs=3), expected)
        smooth = LearningRateSchedule(lambda epoch: 0.9**epoch)
        assert_rates(train(make(), smooth, epochs=3), by_formula(lambda e: 0.9**e, range(3)))
        model = make()  # both multiply; the user's own rate stays, and may be changed
        halves = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))
        rates = train(model, steps, smooth, halves, epochs=2)
        assert_rates(rates, [a * 0.9 ** (n / 6) / (n // 6 + 1) for n, a in enumerate(expected[:12])])
        assert float(model.optimizer.learning_rate) == 0.25

    in_every_way(script)


def on_schedules_of_keras() -> None:
    def script(make: Any) -> None:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=4, decay_rate=0.5)
        rates = train(make(schedule), LearningRateSchedule({0.5: 0.1}), epochs=2)
        assert_rates(rates, [0.5 * 0.5 ** (n / 4) * (1.0 if n < 3 else 0.1) for n in range(12)])

    in_every_way(script)


def several_steps_an_execution_and_accumulation() -> None:
    def script(make: Any) -> None:
        model = make()
        model.steps_per_execution = 3
        warmup = LearningRateWarmup(1.5, start=0.1)
        assert_rates(train(model, warmup, epochs=3), by_formula(lambda e: 0.1 + 0.9 * min(1, e / 1.5), range(3)))
        model = make(gradient_accumulation_steps=2)
        rates = train(model, LearningRateSchedule(lambda e: e), epochs=2)
        assert_rates(rates, by_formula(lambda e: e, range(2))[1::2])  # an update in every second step

    in_every_way(script)


def from_an_initial_epoch_and_resumed() -> None:
    """The position is Keras' epoch: iterations of an earlier run, by any number of ranks, do not count twice."""

    def script(make: Any) -> None:
        def warmup() -> LearningRateWarmup:
            return LearningRateWarmup(3, start=0.2)

        def rise(epoch: float) -> float:
            return 0.2 + 0.8 * min(1.0, epoch / 3)

        assert_rates(train(make(), warmup(), initial_epoch=2, epochs=4), by_formula(rise, range(2, 4)))
        whole = make()
        whole_rates = train(whole, warmup(), epochs=4)
        assert_rates(whole_rates, by_formula(rise, range(4)))
        first, second = make(), make()
        train(first, warmup(), epochs=2)
        train(second, num_steps=1)  # builds the optimizer
        for ours, theirs in zip(
            [*second.variables, *second.optimizer.variables],
            [*first.variables, *first.optimizer.variables],
            strict=True,
        ):
            ours.assign(theirs)
        assert_rates(train(second, warmup(), initial_epoch=2, epochs=4), whole_rates[12:])
        np.testing.assert_allclose(second.get_weights()[0], whole.get_weights()[0], rtol=1e-9)
        # As with twice as many ranks: half of the steps an epoch, after a run that made all of them.
        rates = train(second, warmup(), initial_epoch=1, epochs=3, num_steps=3)
        assert_rates(rates, by_formula(rise, range(1, 3), num_steps=3))

    in_every_way(script)


def a_second_fit_has_its_own() -> None:
    def script(make: Any) -> None:
        model = make()
        train(model, LearningRateSchedule({0: 0.1}))
        assert_rates(train(model), [0.5] * 6)
        assert_rates(train(model, LearningRateSchedule({0: 0.2})), [0.1] * 6)
        assert "_kdist_step_extensions" not in model.__dict__

    in_every_way(script)


def a_fit_that_raised_leaves_nothing_behind_in_the_scope() -> None:
    def fail(batch: int, logs: Any) -> None:
        raise RuntimeError("planted")

    with kdist.scope(scale_lr=None):
        model = noting()
        with pytest.raises(RuntimeError, match="planted"):
            train(model, LearningRateSchedule({0: 0.1}), keras.callbacks.LambdaCallback(on_train_batch_begin=fail))
        assert_rates(train(model), [0.5] * 6)


def momentum_is_corrected() -> None:
    """As Goyal et al. write it: u = m u + g, w -= rate u. Without, the velocity holds the old rate."""

    def final_weight(momentum_correction: bool) -> float:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(Noting(0.5, momentum=0.9), lambda y, predicted: predicted)  # the gradient is 1
        n = STEPS * BATCH * (size() if "_kdist" in model.__dict__ else 1)
        schedule = LearningRateSchedule({0.5: 4.0, 1: 0.1}, momentum_correction=momentum_correction)
        data = np.ones((n, 1))
        history = model.fit(data, data, batch_size=BATCH, epochs=2, verbose=0, callbacks=[schedule])
        assert history.history["effective_learning_rate"] == pytest.approx([2.0, 0.05])
        return float(model.get_weights()[0][0, 0])

    rates = [0.5] * 3 + [2.0] * 3 + [0.05] * 6
    corrected = uncorrected = u = v = 0.0
    for rate in rates:
        u = 0.9 * u + 1
        corrected -= rate * u
        v = 0.9 * v - rate
        uncorrected += v

    def script(_: Any) -> None:
        assert final_weight(True) == pytest.approx(corrected)
        assert final_weight(False) == pytest.approx(uncorrected)

    assert abs(corrected - uncorrected) > 1
    in_every_way(script)


def warmup_takes_the_place_of_the_scopes() -> None:
    factor = size()
    fresh()
    with kdist.scope(scale_lr="linear", warmup_epochs=3):
        rates = train(noting(), LearningRateWarmup(1.5), epochs=3)
    rise = [1 / factor + (1 - 1 / factor) * min(1, n / 9) for n in range(18)]
    assert_rates(rates, [0.5 * factor * part for part in rise])
    assert rates[0] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.5 * factor)
    with kdist.scope(scale_lr=None):  # nobody scales: the rate is the user's, and rises to that
        assert_rates(train(noting(), LearningRateWarmup(1.5), epochs=3), [0.5 * part for part in rise])


def each_optimizer_warms_up_from_the_users_rate_to_its_own() -> None:
    """The factors differ; the compiled optimizer makes no step."""
    fresh()
    with kdist.scope():
        model = TwoOptimizers()
        model.one = type("SGD", (Noting,), {})(RATE, name="one")  # the rule goes by the class's name
        model.compile()
        x, y = np.ones((size() * BATCH, 5)), np.ones((size() * BATCH, 1))
        logs = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[LearningRateWarmup(2)]).history
    for name, factor in (("one", size()), ("other", size() ** 0.5)):
        rates = [RATE, RATE * (1 + factor) / 2, RATE * factor]
        np.testing.assert_allclose(logs[f"effective_learning_rate_{name}"], rates, rtol=1e-6)
        if name == "one":
            assert_rates(model.one.rates, rates)


def as_in_one_process() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "mse", metrics=["mae"])
        callbacks = [LearningRateWarmup(1.5, start=0.1), LearningRateSchedule({2: 0.1})]
        history = model.fit(**fed("arrays", (x, y), batch), epochs=3, verbose=0, callbacks=callbacks)
        return outcome(model, history)

    both(script)


def with_loss_scaling_as_in_one_process() -> None:
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
        history = model.fit(
            **fed("arrays", (x, y), batch), epochs=2, verbose=0, callbacks=[LearningRateSchedule({0.5: 0.3})]
        )
        return outcome(model, history)

    fresh()
    plain = script(size() * BATCH)
    fresh()
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    compare(plain, ours)
    assert plain["history"]["effective_learning_rate"] == pytest.approx([0.03, 0.03])


def an_unknown_number_of_steps_is_refused() -> None:
    data = tf.data.Dataset.from_tensor_slices((np.ones((24, 5)), np.ones((24, 2)))).batch(4).filter(lambda *_: True)
    with kdist.scope(scale_lr=None):
        model = noting()
        with pytest.raises(DataError, match="steps_per_epoch"):
            model.fit(data, verbose=0, callbacks=[LearningRateSchedule({1: 0.5})])
        steps = -(-6 // size())
        model.fit(data, verbose=0, callbacks=[LearningRateSchedule({0.5: 0.1}, steps_per_epoch=steps)])
    assert_equal_everywhere(model.optimizer.rates)
    assert model.optimizer.rates[0] == 0.5
    assert model.optimizer.rates[-1] == pytest.approx(0.05)


def the_rate_in_the_logs_is_at_the_step_of_the_schedule() -> None:
    """Which is stretched over the ranks, whatever the factor."""
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 1000, 0.0)
    with kdist.scope(scale_lr=1.0):
        model = noting(schedule)
        train(model, LearningRateSchedule({0: 0.5}), epochs=2)
    expected = [0.5 * float(schedule(steps * size())) for steps in (STEPS, 2 * STEPS)]
    assert_rates(model.history.history["effective_learning_rate"], expected)


def an_optimizer_of_several_is_refused() -> None:
    with kdist.scope(scale_lr=None):
        model = mlp()
        parts = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)
        model.compile(keras.optimizers.MultiOptimizer(lambda variable: parts["bias" in variable.path]), "mse")
        with pytest.raises(ScopeError, match="a MultiOptimizer"):
            model.fit(np.ones((BATCH, 5)), np.ones((BATCH, 2)), verbose=0, callbacks=[LearningRateSchedule({1: 0.5})])


CASES = {
    function.__name__: function
    for function in (
        piecewise_and_smooth_multipliers,
        on_schedules_of_keras,
        several_steps_an_execution_and_accumulation,
        from_an_initial_epoch_and_resumed,
        a_second_fit_has_its_own,
        a_fit_that_raised_leaves_nothing_behind_in_the_scope,
        momentum_is_corrected,
        warmup_takes_the_place_of_the_scopes,
        each_optimizer_warms_up_from_the_users_rate_to_its_own,
        as_in_one_process,
        with_loss_scaling_as_in_one_process,
        an_unknown_number_of_steps_is_refused,
        the_rate_in_the_logs_is_at_the_step_of_the_schedule,
        an_optimizer_of_several_is_refused,
    )
}
