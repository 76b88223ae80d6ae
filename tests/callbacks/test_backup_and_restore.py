"""Interrupted trainings go on where they were: on 2 ranks, on 3 what 2 have left, in one process, after SIGKILL."""

import numpy as np
import pytest

from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.errors import CheckpointError
from tests.callbacks import cases_resume as cases
from tests.callbacks.interruptions import kill_model_saver, kill_saver
from tests.helpers import spmd

TARGETS = {2: f"{cases.__name__}:CASES", 1: f"{cases.__name__}:ALONE", 3: f"{cases.__name__}:OTHERS"}
# What differs little from a case that runs, or is rare: what compressions and `sync_every` keep, several steps an
# execution. All of it by `python -m tests.callbacks.full`.
LEFT_OUT = (
    *("between_epochs_tf_data", "between_epochs_py_dataset"),
    *("in_an_epoch_tf_data", "in_an_epoch_py_dataset"),  # but for a place in them
    *("in_an_epoch_arrays_steps", "in_an_epoch_py_dataset_workers", "in_an_epoch_py_dataset_by_itself"),
    *("in_an_epoch_tf_data_unseeded", "in_an_epoch_tf_data_unknown", "in_an_epoch_tf_data_repeat"),
    *("in_an_epoch_generator", "told_to_go_in_the_last_step_and_between_epochs"),
    *("kept_beside_the_model_outer_momentum", "kept_beside_the_model_power_sgd", "several_steps_an_execution"),
    *("kept_beside_the_model_top_k", "the_newest_is_cut_off", "the_newest_is_incomplete"),
)
LEFT_OUT_ALONE = (
    *("in_an_epoch_arrays", "the_newest_is_changed", "told_to_go_in_an_epoch"),
    *("with_callbacks_of_kdist", "a_backup_of_kerass_own_is_told_of"),
)
PARAMETERS = [
    (ranks, case)
    for ranks, target in TARGETS.items()
    for case in spmd.names(target)
    if case not in LEFT_OUT + LEFT_OUT_ALONE * (ranks == 1)
]


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """Launches each number of ranks once, 2 ranks first: they leave what the others take up."""
    left = tmp_path_factory.mktemp("left")
    only = {ranks: spmd.selected(request, ranks=ranks) for ranks in TARGETS}
    if "taken_up_by_others" in only[1] + only[3] and "left_for_others" not in only[2]:
        only[2].append("left_for_others")
    done = {}

    def launched(ranks):
        for each in dict.fromkeys((2, ranks)):
            if each not in done and only[each]:
                done[each] = spmd.run(
                    TARGETS[each],
                    each,
                    only=only[each],
                    env={cases.FOLDER: str(left)},
                    timeout=570,
                )
        return done[ranks]

    return launched


@pytest.mark.parametrize(("ranks", "case"), PARAMETERS)
def test_case(launches, ranks, case):
    launches(ranks).check(case)


def test_killed_while_it_saves(tmp_path):
    numbers = kill_saver(tmp_path / "saved", 3, seed=0)
    assert len(set(numbers)) > 1


def test_model_checkpoint_killed_while_it_saves(tmp_path):
    numbers = kill_model_saver(tmp_path, 4, seed=0)
    assert len(set(numbers)) > 1


def test_a_lost_save_is_seen(tmp_path, monkeypatch):
    """The test above can fail: a writer that writes in place is caught."""
    folder = CheckpointDirectory(tmp_path)
    folder.write({"part": {"number": 1, "values": np.ones(3)}})
    target = folder.write({"part": {"number": 2, "values": np.ones(3)}})
    whole = (target / "arrays.npz").read_bytes()
    for length in range(0, len(whole), 41):
        (target / "arrays.npz").write_bytes(whole[:length])
        path, found = CheckpointDirectory(tmp_path).read()
        assert found["part"]["number"] == 1
    (target / "arrays.npz").write_bytes(whole)
    assert CheckpointDirectory(tmp_path).read()[1]["part"]["number"] == 2


def test_what_cannot_be_read_is_never_deleted(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    paths = [folder.write({"part": {"number": n}}) for n in range(2)]
    (paths[0] / "state.json").write_text("{")
    paths += [folder.write({"part": {"number": n}}) for n in range(2, 5)]
    assert sorted(tmp_path.iterdir()) == [paths[0], *paths[-2:]]
    folder.delete()
    assert list(tmp_path.iterdir()) == [paths[0]]
    with pytest.raises(CheckpointError, match="No checkpoint can be read"):
        CheckpointDirectory(tmp_path).read()


def test_a_file_with_the_name_of_a_checkpoint_stays(tmp_path):
    """A save deletes what it can read."""
    folder = CheckpointDirectory(tmp_path)
    (tmp_path / "checkpoint-00000001").touch()
    for number in range(4):
        folder.write({"part": {"number": number}})
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "checkpoint-00000001").is_file()


def test_no_pickle_is_read_or_written(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    with pytest.raises(CheckpointError, match="Python objects are not saved"):
        folder.write({"part": {"values": np.array([object()])}})
    assert folder.read() is None
    target = folder.write({"part": {"values": np.zeros(3)}})
    np.savez(target / "arrays.npz", values=np.array([print]))  # somebody puts a pickle there
    with pytest.raises(CheckpointError, match="No checkpoint can be read"):
        folder.read()
