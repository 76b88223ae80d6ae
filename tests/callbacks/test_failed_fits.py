"""In one process a `fit` that raised leaves nothing of its callbacks behind, though Keras calls no callback then."""

import os
import signal

import keras
import numpy as np
import pytest

from kdist.callbacks import BackupAndRestore, LearningRateSchedule, NaNPolicy, Preemption, Throughput
from kdist.step.extensions import has_extensions

X, Y = np.ones((8, 2)), np.ones((8, 1))
NAN = np.where(np.arange(8)[:, None] == 0, np.nan, X)


def made(**kwargs):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse", **kwargs)
    return model


def fail_with(model, callbacks):
    def fail(*_):
        raise RuntimeError("planted")

    callbacks = [*callbacks, keras.callbacks.LambdaCallback(on_epoch_end=fail)]
    with pytest.raises(RuntimeError, match="planted"):
        model.fit(X, Y, verbose=0, callbacks=callbacks)


TRAININGS = {
    "fit": lambda model, x: model.fit(x, Y, verbose=0),
    "fit with another": lambda model, x: model.fit(x, Y, verbose=0, callbacks=[Throughput()]),
    "fit after compile": lambda model, x: (model.compile(keras.optimizers.SGD(0.1), "mse"), TRAININGS["fit"](model, x)),
    "train_on_batch": lambda model, x: model.train_on_batch(x, Y),
}


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize(
    ("make", "x"),  # made in the test: a callback that lives until the end of all tests keeps its patches
    [(lambda: LearningRateSchedule(lambda epoch: 0.0), X), (lambda: NaNPolicy("skip"), NAN), (Throughput, X)],
)
def test_what_callbacks_add_to_the_step_ends_with_it(make, x, train):
    model, expected = made(), made()
    fail_with(model, [make()])
    weights = model.get_weights()
    expected.set_weights(weights)
    train(model, x)
    train(expected, x)
    assert not has_extensions(model)
    assert not {"train_step", "make_train_function"} & vars(model).keys()
    np.testing.assert_array_equal(model.get_weights()[0], expected.get_weights()[0])
    assert np.any(model.get_weights()[0] != weights[0])


def test_the_same_callback_again_and_a_batch_within_its_fit():
    """Whether its `fit` runs is seen from within: `train_on_batch` of a callback does not end it."""
    model, schedule = made(), LearningRateSchedule(lambda epoch: 0.0)
    fail_with(model, [schedule])
    batch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.train_on_batch(X, Y))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[batch, schedule])
    np.testing.assert_array_equal(model.get_weights()[0], 0.0)
    assert not has_extensions(model)


def test_a_callback_that_another_one_calls():
    class Delegating(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            schedule = LearningRateSchedule(lambda epoch: 0.0)
            schedule.set_params(self.params)
            schedule.set_model(self.model)
            schedule.on_train_begin()
            schedule._table.assign([0.0])

    model = made()
    fail_with(model, [Delegating()])
    np.testing.assert_array_equal(model.get_weights()[0], 0.0)
    model.fit(X, Y, verbose=0)
    assert np.all(model.get_weights()[0] != 0.0)


@pytest.mark.parametrize("compiled_anew", [True, False])
def test_jit_compile_is_as_the_last_compile_has_it(compiled_anew):
    model = made(jit_compile=True)
    fail_with(model, [Throughput()])
    assert not model.jit_compile
    if compiled_anew:
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.make_train_function()
    assert model.jit_compile is not compiled_anew


@pytest.mark.parametrize("again", ["nothing", "fit without it", "fit with it", "fit with it that raises"])
def test_signals_do_what_they_did(again, tmp_path):
    """A script may handle signals by itself around a `fit` that raises."""
    received = []

    def handle(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        model, preemption = made(), Preemption(signals=("SIGTERM",))
        others = [preemption, BackupAndRestore(str(tmp_path / "backup"))]
        fail_with(model, others)
        if again == "fit without it":
            model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: terminate())])
        elif again == "fit with it":
            model.fit(X, Y, epochs=2, verbose=0, callbacks=others)
            assert signal.getsignal(signal.SIGTERM) is handle
        elif again == "fit with it that raises":
            fail_with(model, others)
        if again != "fit without it":
            terminate()
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_within_fit_still_saves(tmp_path):
    send = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: terminate())
    callbacks = [Preemption(signals=("SIGTERM",)), BackupAndRestore(str(tmp_path / "backup")), send]
    with pytest.raises(SystemExit, match="75"):
        made().fit(X, Y, verbose=0, callbacks=callbacks)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
