"""The scaled learning rate: as one process whose rate is set by hand at every step, and never seen in the user's."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import kdist
from kdist.scaling import num_warmup_steps, warmup_multiplier
from tests.training.behaviours import assert_equal_everywhere
from tests.training.fidelity import BATCH, compare, fresh, mlp, rows, size

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

    def _multiplier(self, step: int) -> float:
        return warmup_multiplier(max(step, 0), self._factor, self._warmup_steps)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now, before = self._multiplier(self._step), self._multiplier(self._step - 1)
        optimizer = self.model.optimizer
        optimizer.learning_rate = RATE * now
        if type(optimizer).__name__ == "SGD" and optimizer.momentum and self._step:
            for velocity in optimizer.momentums:
                velocity.assign(np.asarray(velocity) * (now / before))
        self._step += 1


def outcome(model: keras.Model) -> dict[str, Any]:
    skipped = ("learning_rate",)
    return {
        "weights": [np.asarray(v) for v in model.weights],
        "slots": [np.asarray(v) for v in model.optimizer.variables if v.name not in skipped],
    }


def scaled_as_by_hand(make: Any, factor: float, *, epochs: int = 4, warmup: Any = 1.5, **scope: Any) -> None:
    x, y = data()
    fresh()
    plain = mlp()
    plain.compile(make(), "mse")
    steps = num_warmup_steps(warmup, epochs, steps_of_epoch())
    plain.fit(
        x, y, batch_size=size() * BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[ByHand(factor, steps)]
    )
    fresh()
    with kdist.scope(warmup_epochs=warmup, **scope):
        model = mlp()
        model.compile(make(), "mse")
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    compare(outcome(plain), outcome(model), rtol=1e-6)  # the multiplier is a float32
    np.testing.assert_allclose(float(model.optimizer.learning_rate), RATE, rtol=1e-7)
    effective = history.history["effective_learning_rate"]
    ends = [RATE * warmup_multiplier((epoch + 1) * steps_of_epoch(), factor, steps) for epoch in range(epochs)]
    np.testing.assert_allclose(effective, ends, rtol=1e-6)
    assert_equal_everywhere(effective)


def sgd_linear() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE), float(size()))


def momentum_linear_with_correction() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE, momentum=0.9), float(size()))


def nesterov_linear_with_correction() -> None:
    scaled_as_by_hand(lambda: keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True), float(size()), warmup="auto")


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


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collects what kdist logs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kdist")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class MyOptimizer(keras.optimizers.SGD):
    """A rule of one's own."""


def unknown_optimizers_are_left_alone_with_one_warning() -> None:
    x, y = data()
    fresh()
    with logged() as records, kdist.scope():
        model = mlp()
        model.compile(MyOptimizer(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        history = model.fit(x, y, batch_size=BATCH, verbose=0)
    warnings = [r for r in records if r.levelno >= logging.WARNING]
    assert len(warnings) == (1 if kdist.is_chief() else 0), [r.getMessage() for r in warnings]
    if warnings:
        assert "MyOptimizer" in warnings[0].getMessage()
    assert "effective_learning_rate" not in history.history


def the_report_says_old_new_rule_and_why() -> None:
    x, y = data()
    fresh()
    with logged() as records, kdist.scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
    said = "\n".join(record.getMessage() for record in records)
    if kdist.is_chief():
        for words in ("linear", "0.01", f"{RATE * size():g}", f"{size()} ranks", "larger global batch", "warm-up"):
            assert words in said, (words, said)
    else:
        assert not said


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
    """A tenth of the epochs: known when the first one is over."""
    import tensorflow as tf

    x, y = data()
    fresh()
    with kdist.scope(warmup_epochs=2):
        model = mlp()
        model.compile(keras.optimizers.SGD(RATE), "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).filter(lambda *_: True)
        history = model.fit(dataset, epochs=3, verbose=0)
    effective = assert_equal_everywhere(history.history["effective_learning_rate"])
    np.testing.assert_allclose(effective[1:], [RATE * size()] * 2, rtol=1e-6)


def schedules_are_stretched() -> None:
    """N times fewer steps an epoch: a schedule still ends with the run. Its values are multiplied too."""
    x, y = data()

    def schedule() -> keras.optimizers.schedules.LearningRateSchedule:
        return keras.optimizers.schedules.PolynomialDecay(RATE, 4 * steps_of_epoch() * size(), 0.001)

    class SetByHand(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            optimizer.learning_rate = size() * float(schedule()(int(optimizer.iterations) * size()))

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
        adam_sqrt,
        rules_by_name,
        a_number_and_no_warmup,
        left_alone,
        unknown_optimizers_are_left_alone_with_one_warning,
        the_report_says_old_new_rule_and_why,
        a_second_fit_does_not_warm_up_again,
        warmup_of_data_whose_steps_are_unknown,
        schedules_are_stretched,
        the_users_rate_is_read_and_set_unscaled,
    )
}
