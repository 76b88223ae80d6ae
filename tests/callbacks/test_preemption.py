"""A training that is told to go, in one process; on several ranks: test_backup_and_restore.py, tests/restarts."""

import os
import signal
import time
import uuid
from pathlib import Path

import keras
import numpy as np
import pytest

import kdist
from kdist.checkpoint import preemption
from kdist.restarts import request
from kdist.restarts.events import OwnReports


def test_a_second_signal_has_its_usual_effect(tmp_path):
    usual = []

    def tell(batch, logs):
        for _ in range(2):  # two at once are one
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not usual
        time.sleep(preemption._SAME_NOTICE)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: usual.append(number))
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_end=tell),
            kdist.callbacks.BackupAndRestore(tmp_path / "backup"),
            kdist.callbacks.Preemption(),
        ]
        with pytest.raises(SystemExit, match="75"):
            model.fit(np.zeros((2, 1)), np.zeros((2, 1)), batch_size=1, verbose=0, callbacks=callbacks)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert usual == [signal.SIGUSR1]


@pytest.mark.parametrize("kind", ["BackupAndRestore", "ModelCheckpoint"])
def test_a_signal_when_training_ends_saves(tmp_path, kind):
    tell = keras.callbacks.LambdaCallback(on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGUSR1))
    saving = {
        "BackupAndRestore": kdist.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3),
        "ModelCheckpoint": keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=3),
    }[kind]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(SystemExit, match="75"):
        model.fit(
            np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0,
            callbacks=[tell, saving, kdist.callbacks.Preemption()],
        )  # fmt: skip
    assert len(list(tmp_path.rglob("*"))) > 0
    if kind == "BackupAndRestore":  # the next attempt has nothing to train, and deletes it
        again = keras.models.clone_model(model)
        again.compile("sgd", "mse")
        again.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0, callbacks=[saving])
        np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
        assert not (tmp_path / "backup").exists()


def test_a_signal_when_all_is_deleted_is_told_of(tmp_path, caplog):
    class Late(kdist.callbacks.BackupAndRestore):
        def on_train_end(self, logs=None):
            super().on_train_end(logs)
            os.kill(os.getpid(), signal.SIGUSR1)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [Late(tmp_path / "backup"), kdist.callbacks.Preemption()]
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0, callbacks=callbacks)
    assert "SIGUSR1 came when fit had ended" in caplog.text


def test_a_request_that_is_followed_is_removed(tmp_path, monkeypatch):
    """`kdist run` may be on another host than rank 0, where the request is."""
    job = tmp_path / f"job-{uuid.uuid4().hex}"
    monkeypatch.setattr(preemption, "own_reports", OwnReports(running=job))
    asked = Path(request.path_of(job, request.NOTICE))
    asked.touch()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [kdist.callbacks.BackupAndRestore(tmp_path / "backup"), kdist.callbacks.Preemption()]
    with pytest.raises(SystemExit, match="75"):
        model.fit(np.zeros((2, 1)), np.zeros((2, 1)), batch_size=1, verbose=0, callbacks=callbacks)
    assert not asked.exists()
