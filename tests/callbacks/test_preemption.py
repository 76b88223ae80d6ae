"""A training that is told to go, in one process; on several ranks: test_backup_and_restore.py, tests/restarts."""

import os
import signal
import time
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


def test_a_request_that_is_followed_is_removed(tmp_path, monkeypatch):
    """`kdist run` may be on another host than rank 0, where the request is."""
    monkeypatch.setattr(preemption, "own_reports", OwnReports(running=tmp_path / "job"))
    asked = Path(request.path_of(tmp_path / "job", request.NOTICE))
    asked.touch()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [kdist.callbacks.BackupAndRestore(tmp_path / "backup"), kdist.callbacks.Preemption()]
    with pytest.raises(SystemExit, match="75"):
        model.fit(np.zeros((2, 1)), np.zeros((2, 1)), batch_size=1, verbose=0, callbacks=callbacks)
    assert not asked.exists()
