"""In one process: a step's multiplier is that of all its updates, however many there are, by whatever optimizer."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.callbacks import BackupAndRestore, LearningRateSchedule, NaNPolicy

STEPS = 4


class TwoOptimizers(keras.Model):
    """Each step updates `a` twice by one optimizer, `b` once by another; the gradients are 1."""

    def __init__(self, **settings):
        super().__init__()
        self.a = self.add_weight(shape=(), initializer="zeros")
        self.b = self.add_weight(shape=(), initializer="zeros")
        self.optimizer_a, self.optimizer_b = (keras.optimizers.SGD(1.0, **settings) for _ in range(2))
        self.built = True

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        for optimizer, weight in [(self.optimizer_a, self.a)] * 2 + [(self.optimizer_b, self.b)]:
            optimizer.apply([tf.constant(1.0)], [weight])
        return {"a": self.a.value + 0.0}


def weights_by_step(schedule, *, epochs=1, **settings):
    model, seen = TwoOptimizers(**settings), []
    model.compile()
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append([float(model.a), float(model.b)])
    )
    model.fit(np.ones((STEPS, 1)), batch_size=1, epochs=epochs, verbose=0, callbacks=[schedule, note])
    return seen


@pytest.mark.parametrize("epochs", [1, 2])
def test_all_updates_of_a_step_have_its_multiplier(epochs):
    seen = weights_by_step(LearningRateSchedule(lambda epoch: 1 + STEPS * epoch), epochs=epochs)
    sums = np.cumsum(1.0 + np.arange(STEPS * epochs))
    np.testing.assert_allclose(seen, [[-2 * each, -each] for each in sums])


def test_velocities_are_rescaled_once_a_step():
    a = b = u = v = 0.0
    expected = []
    for step in range(STEPS):
        rate = 1.0 + step
        for _ in range(2):
            u = 0.9 * u + 1
            a -= rate * u
        v = 0.9 * v + 1
        b -= rate * v
        expected.append([a, b])
    seen = weights_by_step(LearningRateSchedule(lambda epoch: 1 + STEPS * epoch), momentum=0.9)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


class Descends(keras.Model):
    """Its gradient is each step's number; one below 0 makes no update."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros")
        self.built = True

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        gradient = self.optimizer.scale_loss(tf.reduce_sum(data))
        tf.cond(gradient < 0, lambda: None, lambda: self.optimizer.apply([gradient], [self.weight]))
        return {"mine": gradient}


@pytest.mark.parametrize(
    ("number", "has_loss_scale", "before", "after"),
    [
        (-1.0, False, [], []),
        (np.inf, True, [], []),
        (np.nan, False, [NaNPolicy("skip")], []),
        (np.nan, False, [], [NaNPolicy("skip")]),
    ],
    ids=["a branch", "overflow", "NaNPolicy first", "NaNPolicy last"],
)
def test_velocities_are_rescaled_behind_a_step_without_an_update(number, has_loss_scale, before, after):
    numbers = np.array([number, 2, number, 3])
    velocity = weight = 0.0
    for rate, gradient in [(1, 2), (0.1, 3), (4, 2), (4, 3)]:
        velocity = 0.9 * velocity + gradient
        weight -= rate * velocity
    model, optimizer = Descends(), keras.optimizers.SGD(1.0, momentum=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0) if has_loss_scale else optimizer)
    model.optimizer.build([model.weight])
    schedule = LearningRateSchedule({2 / STEPS: 0.1, 1: 4.0})
    callbacks = [*before, schedule, *after]
    model.fit(numbers[:, np.newaxis], batch_size=1, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert float(model.weight) == pytest.approx(weight)


def test_a_training_that_resumes_behind_such_a_step_rescales_as_one_that_was_not_interrupted(tmp_path):
    def train(*callbacks):
        model = Descends()
        model.compile(keras.optimizers.SGD(1.0, momentum=0.9))
        schedule = LearningRateSchedule(lambda epoch: 1 + 4 * epoch)
        numbers = np.array([2.0, -1, 3, 2])[:, np.newaxis]
        model.fit(numbers, batch_size=1, epochs=2, shuffle=False, verbose=0, callbacks=[schedule, *callbacks])
        return float(model.weight)

    class Interrupted(Exception):
        pass

    def interrupt(batch, logs):
        if batch == 2:
            raise Interrupted

    backup = tmp_path / "backup"
    with pytest.raises(Interrupted):
        train(keras.callbacks.LambdaCallback(on_train_batch_end=interrupt), BackupAndRestore(backup, save_freq=2))
    assert train(BackupAndRestore(backup, save_freq=2)) == train()


def test_a_copy_trains_by_itself():
    """Tuners copy the callbacks for each trial."""
    given = LearningRateSchedule(lambda epoch: 1 + STEPS * epoch)
    expected = weights_by_step(given)
    assert weights_by_step(copy.deepcopy(LearningRateSchedule(lambda epoch: 1 + STEPS * epoch))) == expected
    given.set_model(None)
    assert weights_by_step(copy.deepcopy(given)) == expected
