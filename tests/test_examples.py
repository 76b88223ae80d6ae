"""The examples on two processes: one output, one set of files; the first of them by every way that it names."""

import csv
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import needs, spmd

EXAMPLES = spmd.ROOT / "examples"
BESIDE = Path(sys.executable).parent
QUIET = {name: spmd.RANK_ENVIRONMENT[name] for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")}
AS_ROOT = {name: value for name, value in spmd.RANK_ENVIRONMENT.items() if "RUN_AS_ROOT" in name}

WAYS = {
    "python": [sys.executable],
    "kdist run": [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"],
    "mpirun": [str(BESIDE / "mpirun"), "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable],
    "horovodrun": [str(BESIDE / "horovodrun"), "-np", "2", "--gloo", sys.executable],
}
TRAIN_ROWS = 1437  # four fifths of 1797


def run(way, example, *arguments, cwd, **env):
    """Runs an example, asserts that it ended well, and returns what it said."""
    finished = spmd.execute(
        [*WAYS[way], str(EXAMPLES / example), *arguments], env={**QUIET, **AS_ROOT, **env}, timeout=240, cwd=cwd
    )
    assert finished.returncode == 0, finished.output
    return finished.output


def accuracy(output):
    """Returns the one result that an example prints; twice is an error."""
    (found,) = re.findall(r"test accuracy: ([01]\.\d+)", output)
    return float(found)


def num_steps(batch_size, ranks):
    return -(-TRAIN_ROWS // (batch_size * ranks))


@pytest.mark.parametrize(
    ("example", "way"),
    [*(("digits.py", way) for way in ("python", "kdist run", "mpirun")), ("custom_train_step.py", "kdist run")],
)
def test_fit_shows_one_progress_bar(example, way, tmp_path):
    ranks = 1 if way == "python" else 2
    output = run(way, example, "--epochs", "3", "--batch-size", "16", cwd=tmp_path)
    assert accuracy(output) > 0.8
    steps = num_steps(16, ranks)
    assert set(re.findall(r"m *\d+/(\d+)\x1b", output)) == {str(steps)}
    assert output.count("Epoch 1/3") == output.count("Epoch 3/3") == 1
    assert len(re.findall(rf"m *{steps}/{steps}\x1b[^\n]*val_loss", output)) == 3
    written = {"digits.keras", "digits.csv"} if example == "digits.py" else set()
    assert set(os.listdir(tmp_path)) == written


def test_a_custom_training_loop_prints_one_line_an_epoch(tmp_path):
    output = run("mpirun", "custom_training_loop.py", "--epochs", "3", "--batch-size", "32", cwd=tmp_path)
    assert accuracy(output) > 0.8
    # A loop's batches are global: the steps are the same on any number of replicas.
    epochs = re.findall(r"epoch (\d): loss \d\.\d+, (\d+) steps", output)
    assert epochs == [(str(epoch), str(num_steps(32, 1))) for epoch in (1, 2, 3)]


@needs.horovod
@pytest.mark.parametrize(("way", "env"), [("horovodrun", {}), ("mpirun", {"KDIST_STRATEGY": "horovod"})])
def test_a_script_that_was_horovods_still_runs_under_its_launchers(way, env, tmp_path):
    output = run(way, "moved_from_horovod.py", "--epochs", "4", cwd=tmp_path, **env)
    assert accuracy(output) > 0.8
    assert "2 ranks train together over horovod" in output


def logs_and_weights(directory):
    """Returns the logs that digits.py wrote, and the weights and the optimizer's variables that it saved."""
    import keras

    model = keras.models.load_model(directory / "digits.keras")
    with open(directory / "digits.csv") as file:
        logs = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return logs, [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def test_digits_on_two_processes_equal_one_with_the_same_global_batches(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
    same = ("--epochs", "4", "--no-shuffle", "--batch-size")
    run("python", "digits.py", *same, "64", cwd=one)
    run("kdist run", "digits.py", *same, "32", cwd=two, KDIST_SCALE_LR="none")
    (logs, weights), (our_logs, our_weights) = logs_and_weights(one), logs_and_weights(two)
    assert [row.keys() for row in our_logs] == [row.keys() for row in logs]
    for row, ours in zip(logs, our_logs, strict=True):
        assert ours == pytest.approx(row, rel=1e-4)
    for one_value, other in zip(weights, our_weights, strict=True):
        scale = np.max(np.abs(one_value), initial=0)
        np.testing.assert_allclose(other, one_value, rtol=0, atol=1e-4 * scale)


def test_callbacks_leave_a_csv_a_log_for_tensorboard_and_a_plot(tmp_path):
    output = run("kdist run", "callbacks.py", "--epochs", "3", cwd=tmp_path)
    assert accuracy(output) > 0.8
    assert re.findall(r"Throughput: \d+ samples/s over (\d) rank\(s\), (\d) epoch\(s\)", output) == [("2", "3")]
    assert len(re.findall(r"worst digit: \d", output)) == 1
    written = tmp_path / "training"
    assert {path.name for path in written.iterdir()} == {"training.csv", "tensorboard", "digits.keras", "summary.txt"}
    assert len(list(written.glob("tensorboard/train/events.out.tfevents.*"))) == 1
    with open(written / "training.csv") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    for row in rows:
        for rank in (0, 1):
            assert sum(row[f"{part}_rank_{rank}"] for part in ("input", "compute", "waiting")) == pytest.approx(1)
        assert row["samples_per_second"] > 0
    # The warm-up ends with the first of three epochs; the last fifth of them takes a tenth of the doubled rate.
    assert [row["effective_learning_rate"] for row in rows] == pytest.approx([0.1, 0.1, 0.01], rel=0.05)
    plotted = spmd.execute([sys.executable, str(EXAMPLES / "plot_training.py")], timeout=120, cwd=tmp_path)
    assert plotted.returncode == 0, plotted.output
    assert (written / "training.png").read_bytes().startswith(b"\x89PNG")
