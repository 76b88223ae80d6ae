"""The scaling rules of the learning rate, and its warm-up."""

import math

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.scaling import (
    LINEAR_RULE_OPTIMIZERS,
    SQRT_RULE_OPTIMIZERS,
    learning_rate_rule,
    num_warmup_steps,
    warmup_multiplier,
)

replicas = st.integers(1, 4096)
factors = st.floats(0.01, 1e4)
steps = st.floats(0, 1e6)


@given(replicas)
def test_linear_for_sgd_and_square_root_for_adaptive_optimizers(n):
    assert learning_rate_rule("auto", "SGD", n).factor == n
    for optimizer in SQRT_RULE_OPTIMIZERS:
        assert learning_rate_rule("auto", optimizer, n).factor == pytest.approx(math.sqrt(n))


def test_a_rule_is_known_for_every_optimizer_of_keras():
    base = keras.optimizers.Optimizer
    optimizers = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    # A LossScaleOptimizer's rate is its inner optimizer's; a MultiOptimizer has none, and is left alone with a warning.
    assert optimizers - {"LossScaleOptimizer", "MultiOptimizer"} <= LINEAR_RULE_OPTIMIZERS | SQRT_RULE_OPTIMIZERS
    assert not LINEAR_RULE_OPTIMIZERS & SQRT_RULE_OPTIMIZERS


def test_an_unknown_optimizer_is_not_scaled():
    rule = learning_rate_rule("auto", "MyOwn", 8)
    assert (rule.factor, rule.is_known) == (1.0, False)
    assert "MyOwn" in rule.why
    assert learning_rate_rule("linear", "MyOwn", 8).is_known


@pytest.mark.parametrize("scale_lr", ["auto", "linear", "sqrt", None])
def test_a_batch_that_did_not_grow_changes_nothing(scale_lr):
    assert learning_rate_rule(scale_lr, "SGD", 1).factor == 1.0


@given(factors, replicas)
def test_a_number_is_the_factor(factor, n):
    assert learning_rate_rule(factor, "Adam", n).factor == factor


@pytest.mark.parametrize("scale_lr", ["quadratic", 0, -1.0, math.inf, math.nan, True, [2]])
def test_an_invalid_rule_is_refused(scale_lr):
    with pytest.raises(ValueError, match=r"`scale_lr` is unknown. Received: scale_lr="):
        learning_rate_rule(scale_lr, "SGD", 2)


@given(st.integers(1, 1000), st.integers(1, 10_000))
def test_automatic_warmup_is_five_epochs_or_a_tenth_of_the_run(epochs, steps_per_epoch):
    found = num_warmup_steps("auto", epochs, steps_per_epoch)
    assert found == pytest.approx(min(5 * steps_per_epoch, epochs * steps_per_epoch / 10))


@given(st.floats(0, 1000), st.integers(1, 1000), st.integers(1, 10_000))
def test_warmup_in_epochs(warmup_epochs, epochs, steps_per_epoch):
    assert num_warmup_steps(warmup_epochs, epochs, steps_per_epoch) == warmup_epochs * steps_per_epoch


@pytest.mark.parametrize("warmup_epochs", ["long", -1, math.inf, math.nan, True, None])
def test_an_invalid_warmup_is_refused(warmup_epochs):
    with pytest.raises(ValueError, match=r"`warmup_epochs` is out of range. Received: warmup_epochs="):
        num_warmup_steps(warmup_epochs, 1, 1)


@given(steps, factors, steps)
def test_the_multiplier_stays_between_one_and_the_factor(step, factor, warmup_steps):
    found = warmup_multiplier(step, factor, warmup_steps)
    assert min(1.0, factor) <= found * (1 + 1e-12)
    assert found <= max(1.0, factor) * (1 + 1e-12)


@given(factors, st.floats(1e-3, 1e6), steps)
def test_the_multiplier_begins_at_one_and_ends_at_the_factor(factor, warmup_steps, beyond):
    assert warmup_multiplier(0, factor, warmup_steps) == 1.0
    assert warmup_multiplier(warmup_steps + beyond, factor, warmup_steps) == pytest.approx(factor)
    assert warmup_multiplier(warmup_steps / 2, factor, warmup_steps) == pytest.approx((1 + factor) / 2)


@given(factors, steps)
def test_without_a_warmup_the_factor_applies_at_once(factor, step):
    assert warmup_multiplier(step, factor, 0) == pytest.approx(factor)


@given(steps, steps, st.floats(1, 1e4), steps)
def test_the_rate_never_falls_during_warmup(one, other, factor, warmup_steps):
    first, second = sorted((one, other))
    assert warmup_multiplier(first, factor, warmup_steps) <= warmup_multiplier(second, factor, warmup_steps)
