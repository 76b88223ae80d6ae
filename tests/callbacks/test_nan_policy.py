"""In one process: NaNPolicy in steps that update in a branch, compute losses in a function, or update several times."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.callbacks import NaNPolicy
from kdist.errors import NotFiniteError
from tests.helpers.logs import logged

STEPS = 6


class Linear(keras.Model):
    """The gradient of its weight is the mean of a batch."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros")
        self.built = True

    def call(self, x):
        return self.weight * x

    def loss_of(self, x):
        return self.compute_loss(x=x, y=x, y_pred=self(x))


class UpdatesInABranch(Linear):
    """Updates in every second step."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.total.assign_add(tape.gradient(loss, self.weight.value))
        self.steps.assign_add(1)
        tf.cond(self.steps % 2 == 0, self.update, lambda: None)
        return {"mine": loss}

    def update(self):
        self.optimizer.apply([self.total.value], [self.weight])
        self.total.assign(0.0)


class LossInAFunction(Linear):
    """Computes its loss in a graph of its own."""

    def train_step(self, data):
        loss, gradient = tf.function(self.loss_and_gradient)(data)
        self.optimizer.apply([gradient], [self.weight])
        return {"mine": loss}

    def loss_and_gradient(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        return loss, tape.gradient(loss, self.weight.value)


class LossesInALoop(Linear):
    """Adds up the gradients of the rows, one after the other."""

    def train_step(self, data):
        def add_row(row, total):
            with tf.GradientTape() as tape:
                loss = self.loss_of(data[row : row + 1])
            return row + 1, total + tape.gradient(loss, self.weight.value)

        _, total = tf.while_loop(lambda row, _: row < tf.shape(data)[0], add_row, (0, 0.0))
        self.optimizer.apply([total], [self.weight])
        return {"mine": total}


class TwoOptimizers(Linear):
    """Updates its weight by two optimizers."""

    def __init__(self):
        super().__init__()
        self.other = keras.optimizers.SGD(0.5)

    def train_step(self, data):
        for optimizer in (self.optimizer, self.other):
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            optimizer.apply([tape.gradient(loss, self.weight.value)], [self.weight])
        return {"mine": loss}


def fitted(model, action, bad=(), **compiled):
    """Trains on steps of two equal rows, of which those of `bad` steps are NaN; returns the model."""
    x = np.repeat(np.arange(1.0, STEPS + 1), 2).astype("float32")[:, np.newaxis]
    for step in bad:
        x[2 * step] = np.nan
    model.compile(keras.optimizers.SGD(0.5), lambda _, predicted: predicted, **compiled)
    model.fit(x, batch_size=2, shuffle=False, verbose=0, callbacks=[NaNPolicy(action)])
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    ("made", "weight"), [(UpdatesInABranch, -5.5), (LossInAFunction, -8.5), (LossesInALoop, -17.0)]
)
def test_steps_of_inner_graphs_are_skipped(made, weight, run_eagerly):
    model = fitted(made(), "skip", bad=(3,), run_eagerly=run_eagerly)
    assert model.history.history["skipped_steps"] == [1]
    assert float(model.weight) == pytest.approx(weight)


@pytest.mark.parametrize("made", [UpdatesInABranch, LossInAFunction, LossesInALoop])
def test_steps_of_inner_graphs_are_raised(made):
    with pytest.raises(NotFiniteError, match=r"Training step \d is not finite. Received: on rank 0 its data"):
        fitted(made(), "raise", bad=(3,))
    fitted(made(), "raise")


def test_a_step_of_two_updates_is_counted_and_told_of_once():
    with logged(logging.WARNING) as lines:
        model = fitted(TwoOptimizers(), "skip", bad=(1, 3))
    assert model.history.history["skipped_steps"] == [2]
    assert ["step 1 " in lines[0], "step 2 " in lines[1]] == [True] * len(lines), lines
    assert float(model.weight) == pytest.approx(-1 - 3 - 5 - 6)
