"""Callbacks that are made wrongly, and what they do in one process."""

import math
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist import callbacks
from kdist.callbacks.learning_rate_schedule import piecewise
from kdist.errors import CheckpointError, NotFiniteError, StrategyError


@pytest.mark.parametrize(
    "make",
    [
        lambda: callbacks.ReplicaCheck(every=0),
        lambda: callbacks.ReplicaCheck(action="ignore"),
        lambda: callbacks.NaNPolicy("ignore"),
        lambda: callbacks.LearningRateWarmup(-1),
        lambda: callbacks.LearningRateWarmup(5, start=0.0),
        lambda: callbacks.LearningRateWarmup(5, start=1.5),
        lambda: callbacks.Preemption(exit_code=0),
        lambda: callbacks.Preemption(exit_code="x"),
        lambda: callbacks.Preemption(signals="SIGTERM"),
        lambda: callbacks.Preemption(signals=["SIGNAL"]),
    ],
)
def test_wrong_arguments_are_refused(make):
    with pytest.raises(StrategyError, match=r"(?s)Received: .*Expected .*Fix: "):
        make()


@pytest.mark.parametrize(
    "arguments", [("",), ("backup", 0), ("backup", "batch"), ("gs://bucket/backup",), (None,), (3,)]
)
def test_backups_that_cannot_be_are_refused(arguments):
    with pytest.raises(CheckpointError, match=r"(?s)Received: .*Expected .*Fix: "):
        callbacks.BackupAndRestore(*arguments)


def test_a_backup_is_asynchronous_or_not():
    with pytest.raises(CheckpointError, match=r"(?s)asynchronous='yes'.*Expected .*True or False"):
        callbacks.BackupAndRestore("backup", asynchronous="yes")


def test_two_backups_in_one_fit_are_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backups = [callbacks.BackupAndRestore(str(tmp_path / name)) for name in ("fast", "slow")]
    with pytest.raises(CheckpointError, match=r"Two BackupAndRestore are in one fit.*fast.*slow.*Fix: keep one"):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=backups)


def test_piecewise_multipliers():
    multiplier = piecewise({2: 0.5, 0.5: 0.9})
    assert [multiplier(epoch) for epoch in (0, 0.49, 0.5, 1.99, 2, 2 - 1e-12, 9)] == [1, 1, 0.9, 0.9, 0.5, 0.5, 0.5]


def test_in_one_process_all_of_them_work_without_an_engine():
    x, y = np.ones((24, 3), "float32"), np.ones((24, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    chief = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(x, y, verbose=0))
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[
            callbacks.LearningRateWarmup(1),
            callbacks.LearningRateSchedule({1: 0.5}),
            callbacks.NaNPolicy("skip"),
            callbacks.ReplicaCheck(2),
            callbacks.ChiefOnly(chief),
            callbacks.Throughput(),
            callbacks.MetricAverage(),
        ],
    ).history
    assert history["effective_learning_rate"] == pytest.approx([0.1, 0.05])
    assert history["skipped_steps"] == [0, 0]
    assert history["waiting_rank_0"] == [0, 0]
    x[5] = np.nan
    with pytest.raises(NotFiniteError, match="on rank 0 its data, a loss of nan"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[callbacks.NaNPolicy()])


def test_a_backup_of_a_model_that_the_first_step_would_build_is_refused_before_it_is_saved(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data, folder = (np.ones((4, 2)), np.ones((4, 1))), tmp_path / "backup"
    backup = callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    with pytest.raises(CheckpointError, match=r"(?s)Received: Sequential .*Expected .*Fix: .*keras\.Input"):
        model.fit(*data, verbose=0, callbacks=[backup])
    assert not folder.exists()
    model.build((None, 2))
    model.fit(*data, verbose=0, callbacks=[backup])
    assert folder.exists()


class _OwnStep(keras.Model):
    """Is never called itself, and has a layer without weights."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.flatten = keras.layers.Flatten()

    def train_step(self, data):
        self.inner.layers[0].bias.assign_add([1.0])
        return {"loss": 0.0}


def test_a_backup_where_nothing_is_known_of_a_batch(tmp_path):
    """Keras reads its rows off the first leaf, here a scalar; a number of rows may be one of NumPy's."""
    model = _OwnStep()
    model.compile("sgd")
    model.fit(tf.data.Dataset.range(3), verbose=0, callbacks=[callbacks.BackupAndRestore(str(tmp_path / "scalars"))])
    assert float(model.inner.layers[0].bias[0]) == 3
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    backup = callbacks.BackupAndRestore(str(tmp_path / "of_numpy"))
    plain.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=np.int64(2), verbose=0, callbacks=[backup])


class _NotANumber(_OwnStep):
    """Logs NaN, and counts no rows."""

    def train_step(self, data):
        return {"own": self.inner.layers[0].bias[0] + math.nan}


def test_an_average_of_nothing_but_nan_needs_no_samples():
    model = _NotANumber()
    model.compile("sgd")
    logs = model.fit(np.ones((2, 1)), verbose=0, callbacks=[callbacks.MetricAverage()]).history
    assert math.isnan(*logs["own"])


def test_a_script_may_make_callbacks_before_its_scope(tmp_path):
    """TensorFlow's collectives need their ranks to meet before anything uses TensorFlow."""
    script = """
import keras, sys, tensorflow as tf
from kdist import callbacks
callbacks.BackupAndRestore(sys.argv[1]), callbacks.ChiefOnly(keras.callbacks.CSVLogger("log")), callbacks.NaNPolicy()
callbacks.LearningRateSchedule({1: 0.1}), callbacks.LearningRateWarmup(2), callbacks.MetricAverage()
callbacks.Preemption(), callbacks.ReplicaCheck(), callbacks.Throughput()
tf.config.threading.set_inter_op_parallelism_threads(1)  # raises if TensorFlow is initialised
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
