"""What a backup tells `kdist run --restarts`, and how often it copies, in one process."""

import secrets
import shutil
import time
import types

import keras
import numpy as np
import pytest

import kdist
from kdist.checkpoint import backup_and_restore
from kdist.checkpoint.storage import host_copies, storage
from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.checkpoint.storage.memory_copies import MemoryCopies
from kdist.restarts import progress
from kdist.restarts.events import OwnReports, read_events
from kdist.restarts.memory import directory_of


@pytest.fixture
def job():
    name = secrets.token_hex(8)
    yield name
    shutil.rmtree(directory_of(name), ignore_errors=True)


def fit(*callbacks, steps=12):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((steps, 1)), np.zeros((steps, 1)), batch_size=1, verbose=0, callbacks=list(callbacks))


def test_auto_counts_the_time_of_the_copy_without_that_of_the_disk(tmp_path, monkeypatch, job):
    now = 0.0

    def after(seconds, function=lambda *_, **__: None):
        def pass_time(*args, **kwargs):
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return pass_time

    clock = types.SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns)
    monkeypatch.setattr(backup_and_restore, "time", clock)
    monkeypatch.setattr(host_copies, "time", clock)
    monkeypatch.setattr(storage, "own_reports", OwnReports(job=job))
    monkeypatch.setattr(CheckpointDirectory, "write", after(100, CheckpointDirectory.write))
    monkeypatch.setattr(MemoryCopies, "write", after(0.045, MemoryCopies.write))
    saves = kdist.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=10, memory_freq="auto")
    fit(keras.callbacks.LambdaCallback(on_train_batch_end=after(1)), saves, steps=17)  # with a copy after the disk's
    assert saves._storage._copies._every == 5  # 1 % of five steps of a second


def test_the_checkpoint_from_which_a_fit_goes_on_is_told(tmp_path, monkeypatch):
    def attempt(name, *callbacks):
        (tmp_path / name).mkdir()
        own_progress = progress.OwnProgress()
        for module in (storage, progress):
            monkeypatch.setattr(module, "own_reports", OwnReports(tmp_path / name, job="job"))
        for module in (backup_and_restore, storage):
            monkeypatch.setattr(module, "own_progress", own_progress)
        with pytest.raises(OSError, match="it broke"):
            fit(*callbacks, kdist.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2))
        return progress.read(str(tmp_path / name), read_events(str(tmp_path / name)))

    def break_after(steps):
        def end(batch, logs):
            if batch == steps:
                raise OSError("it broke")

        return keras.callbacks.LambdaCallback(on_train_batch_end=end)

    first = attempt("first", break_after(5))
    assert first.place == (1, 0, 4)
    assert first.resumed == 0
    second = attempt("second", break_after(9))
    assert second.place == (1, 0, 8)
    assert second.resumed == first.number < second.number


def test_each_fit_of_a_script_resumes_its_own_checkpoints_in_one_directory(tmp_path, monkeypatch):
    trained = []

    def script(*, breaks):
        for module in (backup_and_restore, storage):
            monkeypatch.setattr(module, "own_progress", progress.OwnProgress())  # of a new process
        kept = []
        for fold in range(3):
            keras.utils.set_random_seed(fold)
            x = np.random.default_rng(fold).normal(size=(6, 1))
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1 + fold)])
            model.compile("adam", "mse")

            def end(epoch, logs, fold=fold):
                trained.append((fold, epoch))
                if breaks and (fold, epoch) == (1, 1):
                    raise OSError("it broke")

            callbacks = [
                kdist.callbacks.BackupAndRestore(tmp_path / "backup"),
                keras.callbacks.LambdaCallback(on_epoch_end=end),
            ]
            model.fit(x, x, epochs=3, verbose=0, callbacks=callbacks)
            kept += model.get_weights()
        return kept

    expected = script(breaks=False)
    assert not (tmp_path / "backup").exists()
    with pytest.raises(OSError, match="it broke"):
        script(breaks=True)
    trained.clear()
    resumed = script(breaks=False)
    assert trained == [*((0, epoch) for epoch in range(3)), (1, 1), (1, 2), *((2, epoch) for epoch in range(3))]
    for one, other in zip(expected, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not (tmp_path / "backup").exists()


def test_a_directory_that_is_called_like_those_of_later_fits_leaves_the_users_folder(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    fit(kdist.callbacks.BackupAndRestore(folder / "fit-3"))
    assert folder.is_dir()
    assert not (folder / "fit-3").exists()


def test_the_best_weights_of_early_stopping_are_kept_with_scalars_among_them(tmp_path):
    def made():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Normalization(), keras.layers.Dense(1)])
        model.layers[0].adapt(np.arange(4.0)[:, None])
        model.compile("sgd", "mse")
        return model

    def end(epoch, logs):
        if epoch == 2:
            raise OSError("it broke")

    x = np.arange(4.0)[:, None]

    def stops():  # the best ones are those of the first epoch
        return keras.callbacks.EarlyStopping("loss", patience=9, mode="max", restore_best_weights=True)

    saves = kdist.callbacks.BackupAndRestore(tmp_path / "backup")
    breaks = keras.callbacks.LambdaCallback(on_epoch_end=end)
    with pytest.raises(OSError, match="it broke"):
        made().fit(x, x, epochs=4, verbose=0, callbacks=[saves, stops(), breaks])
    resumed, whole = made(), made()
    resumed.fit(x, x, epochs=4, verbose=0, callbacks=[saves, stops()])
    whole.fit(x, x, epochs=4, verbose=0, callbacks=[stops()])
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
