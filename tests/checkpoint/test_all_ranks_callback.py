"""In one process, backups and preemption find the other callbacks of their list, whoever made them and when."""

import copy
import gc
import inspect

import keras
import numpy as np
import pytest

from kdist.callbacks import BackupAndRestore, Preemption


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def listed(model, callbacks):
    return keras.callbacks.CallbackList(callbacks, model=model)


@pytest.mark.parametrize("preemption_is_made_first", [True, False])
@pytest.mark.parametrize("preemption_is_given_first", [True, False])
def test_backups_come_after_all_others_and_before_preemption(
    preemption_is_made_first, preemption_is_given_first, model, tmp_path
):
    made = [Preemption, lambda: BackupAndRestore(tmp_path)]
    one, two = (make() for make in (made if preemption_is_made_first else made[::-1]))
    preemption, backup = (one, two) if preemption_is_made_first else (two, one)
    given = [preemption, backup] if preemption_is_given_first else [backup, preemption]
    stop = keras.callbacks.EarlyStopping("loss")
    found = listed(model, [*given, stop]).callbacks
    assert found[-2:] == [backup, preemption]
    assert stop in backup.others
    assert backup.others == preemption.others
    assert preemption.siblings == [backup, preemption]


def test_copies_find_the_others_too(model, tmp_path):
    """As tuners make them, for each trial."""
    stop, backup = copy.deepcopy([keras.callbacks.EarlyStopping("loss"), BackupAndRestore(tmp_path / "backup")])
    gc.collect()
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[backup, stop])
    assert stop in backup.others


def test_keras_own_list_is_back_when_the_callbacks_are_gone(model, tmp_path):
    gc.collect()
    before = keras.callbacks.CallbackList.set_model
    backups = [BackupAndRestore(tmp_path) for _ in range(2)]
    assert keras.callbacks.CallbackList.set_model is not before
    backups.pop()
    gc.collect()
    assert keras.callbacks.CallbackList.set_model is not before
    backups.pop()
    gc.collect()
    assert keras.callbacks.CallbackList.set_model is before


@pytest.mark.parametrize("made", [BackupAndRestore, Preemption])
def test_the_signature_is_that_of_the_arguments(made):
    arguments = inspect.signature(made.__init__).parameters
    assert list(inspect.signature(made).parameters.values()) == list(arguments.values())[1:]


@pytest.mark.parametrize(("of_keras", "expected"), [("epoch", "epoch"), (3, 3), (0, 1), (-1, 1)])
def test_keras_own_backup_saves_after_each_step_with_a_frequency_of_0(of_keras, expected, tmp_path):
    given = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=of_keras, delete_checkpoint=False)
    made = BackupAndRestore.from_keras(given)
    assert (made.backup_dir, made.save_freq, made.delete_checkpoint) == (str(tmp_path / "backup"), expected, False)
