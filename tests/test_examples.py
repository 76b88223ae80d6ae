"""The examples on two processes: one output, one set of files; the first of them by every way that it names."""

import ast
import csv
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import needs, spmd

EXAMPLES = spmd.ROOT / "examples"
BESIDE = Path(sys.executable).parent
QUIET = {
    **spmd.WITH_SKLEARN,
    **{name: spmd.RANK_ENVIRONMENT[name] for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")},
}
PLOTS = {**QUIET, **spmd.EVERY_PACKAGE}
AS_ROOT = {name: value for name, value in spmd.RANK_ENVIRONMENT.items() if "RUN_AS_ROOT" in name}

WAYS = {
    "python": [sys.executable],
    "kdist run": [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"],
    "horovodrun": [str(BESIDE / "horovodrun"), "-np", "2", sys.executable],
}
TRAIN_ROWS = 1437  # four fifths of 1797
GLOBAL_BATCH = 32  # of digits.py

# One launch runs these: the arguments of each, the accuracy that it exceeds, and the steps of an epoch of `fit`.
IN_TURN = {
    "custom_train_step.py": (["--epochs", "3", "--batch-size", "16"], 0.8, -(-TRAIN_ROWS // 32)),
    "custom_training_loop.py": (["--epochs", "3", "--batch-size", "32"], 0.8, 0),
    "augmented_cnn.py": (["--epochs", "4"], 0.8, -(-TRAIN_ROWS // 64)),
    "tabular_csv.py": (["--epochs", "6"], 0.85, -(-455 // 32)),
    "text_classifier.py": (["--epochs", "2"], 0.65, None),  # as many as the installed libraries have sentences
    "contrastive.py": (["--epochs", "3"], 0.9, -(-TRAIN_ROWS // 128)),
    "large_embedding.py": (["--epochs", "2"], 0.65, None),
    "transfer_learning.py": (["--epochs", "4"], 0.8, -(-716 // 32)),
    "mixed_precision.py": (["--epochs", "3"], 0.85, -(-TRAIN_ROWS // 64)),
    "several_outputs.py": (["--epochs", "5"], 0.85, -(-TRAIN_ROWS // 64)),
    "sweep.py": (["--epochs", "4"], None, None),
    "export_and_serve.py": (["--epochs", "3"], 0.85, -(-TRAIN_ROWS // 64)),
}


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


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """What digits.py says and leaves, by how it is run: everywhere the same global batches, and the same rate."""
    done = {}

    def by(way):
        if way not in done:
            directory = tmp_path_factory.mktemp("digits")
            batch_size = str(GLOBAL_BATCH if way == "python" else GLOBAL_BATCH // 2)
            arguments = ("--epochs", "4", "--no-shuffle", "--batch-size", batch_size)
            done[way] = run(way, "digits.py", *arguments, cwd=directory, KDIST_SCALE_LR="none"), directory
        return done[way]

    return by


@pytest.mark.parametrize("way", ["python", "kdist run"])
def test_fit_shows_one_progress_bar(way, digits):
    output, directory = digits(way)
    assert accuracy(output) > 0.8
    steps = -(-TRAIN_ROWS // GLOBAL_BATCH)
    assert set(re.findall(r"m *\d+/(\d+)\x1b", output)) == {str(steps)}
    assert output.count("Epoch 1/4") == output.count("Epoch 4/4") == 1
    assert len(re.findall(rf"m *{steps}/{steps}\x1b[^\n]*val_loss", output)) == 4
    assert set(os.listdir(directory)) == {"digits.keras", "digits.csv"}


@needs.horovod
def test_a_script_that_was_horovods_still_runs_under_its_launcher(tmp_path):
    output = run("horovodrun", "moved_from_horovod.py", "--epochs", "4", cwd=tmp_path)
    assert accuracy(output) > 0.8
    assert "2 ranks train together over horovod" in output


def logs_and_weights(directory):
    """Returns the logs that digits.py wrote, and the weights and the optimizer's variables that it saved."""
    import keras

    model = keras.models.load_model(directory / "digits.keras")
    with open(directory / "digits.csv") as file:
        logs = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return logs, [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def test_digits_on_two_processes_equal_one_with_the_same_global_batches(digits):
    (_, one), (_, two) = digits("python"), digits("kdist run")
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
    plotted = spmd.execute([sys.executable, str(EXAMPLES / "plot_training.py")], env=PLOTS, timeout=120, cwd=tmp_path)
    assert plotted.returncode == 0, plotted.output
    assert (written / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """What two ranks left behind: a directory that holds one for each example, and what each printed, by its name."""
    directory = tmp_path_factory.mktemp("in_turn")
    commands = [[name, *arguments] for name, (arguments, *_) in IN_TURN.items()]
    program = [str(spmd.ROOT / "tests" / "examples_in_turn.py"), str(directory), json.dumps(commands)]
    line = [*WAYS["kdist run"], "--output", str(directory / "output"), *program]
    finished = spmd.execute(line, env={**QUIET, **AS_ROOT}, timeout=480)
    assert finished.returncode == 0, finished.output
    _, *parts = re.split(r"^=== (\S+) ===$", (directory / "output" / "rank0.out").read_text(), flags=re.MULTILINE)
    assert parts[::2] == list(IN_TURN)
    return directory, dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("example", [name for name, (_, least, _) in IN_TURN.items() if least is not None])
def test_what_is_run_in_turn_learns_and_shares_the_rows_out(example, in_turn):
    _, printed = in_turn
    _, least, steps = IN_TURN[example]
    assert accuracy(printed[example]) > least
    found = {int(number) for number in re.findall(r"m *\d+/(\d+)\x1b", printed[example])}
    assert len(found) == 1 if steps is None else found == ({steps} if steps else set())


def test_the_chief_alone_speaks(in_turn):
    directory, _ = in_turn
    assert (directory / "output" / "rank1.out").read_text() == ""


def test_files_lie_where_the_examples_say(in_turn):
    directory, _ = in_turn
    written = {name: set(os.listdir(directory / name)) for name in IN_TURN}
    assert {name: files for name, files in written.items() if files} == {
        "tabular_csv.py": {"tissue"},
        "transfer_learning.py": {"base.keras"},
        "sweep.py": {"sweep"},
        "large_embedding.py": {"large_embedding.keras"},
        "export_and_serve.py": {"exported"},
    }


def test_a_custom_training_loop_prints_one_line_an_epoch(in_turn):
    # A loop's batches are global: the steps are the same on any number of replicas.
    epochs = re.findall(r"epoch (\d): loss \d\.\d+, (\d+) steps", in_turn[1]["custom_training_loop.py"])
    assert epochs == [(str(epoch), str(-(-TRAIN_ROWS // 32))) for epoch in (1, 2, 3)]


def test_a_network_of_two_outputs_learns_both(in_turn):
    (found,) = re.findall(r"([01]\.\d+) of even", in_turn[1]["several_outputs.py"])
    assert float(found) > 0.8


def test_sixteen_bits_are_trained_with_a_scaled_loss(in_turn):
    assert "by LossScaleOptimizer" in in_turn[1]["mixed_precision.py"]


def test_a_sweep_is_shared_out_and_the_best_of_all_is_named(in_turn):
    directory, printed = in_turn
    results = [json.loads((directory / "sweep.py" / "sweep" / f"{number}.json").read_text()) for number in range(6)]
    assert [result["rank"] for result in results] == [0, 1] * 3
    assert len({(result["learning_rate"], result["units"]) for result in results}) == 6
    (best,) = re.findall(r"best of 6 settings: (.*)", printed["sweep.py"])
    assert ast.literal_eval(best) == min(results, key=lambda result: result["loss"])
    assert ast.literal_eval(best)["loss"] < 0.8  # that of the mean is 1


def test_an_export_is_served_without_kdist_and_without_keras(in_turn):
    directory, _ = in_turn
    script = str(EXAMPLES / "export_and_serve.py")
    # An import of what is None fails.
    code = (
        f"import runpy, sys; sys.modules.update(kdist=None, keras=None); runpy.run_path({script!r}, None, '__main__')"
    )
    line = [sys.executable, "-c", code, "--serve", str(directory / "export_and_serve.py" / "exported")]
    finished = spmd.execute(line, env=QUIET, timeout=120)
    assert finished.returncode == 0, finished.output
    ((digits, difference),) = re.findall(r"served digits: \[([\d, ]+)\], .* at most (\S+)", finished.output)
    assert len(digits.split(", ")) == 5
    assert float(difference) < 1e-5


def overlooked(examples, table, tests):
    """Returns which examples a table does not list once, and which ones no test names."""
    listed = re.findall(r"^\| \[([^\]]+)\]\(\1\) \|", table, flags=re.MULTILINE)
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    named = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    wrong = [f"{name} is not in the table once" for name in examples if listed.count(name) != 1]
    wrong += [f"{name} is in the table and is not there" for name in sorted({*listed} - {*examples})]
    return wrong + [f"{name} is run by no test" for name in examples if name not in named]


def test_every_example_is_listed_and_run():
    examples = sorted(
        path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb") or path.name == "clusters"
    )
    tests = [path.read_text() for path in (spmd.ROOT / "tests").rglob("test_*.py")]
    assert overlooked(examples, (EXAMPLES / "README.md").read_text(), tests) == []


def test_an_example_that_is_overlooked_is_seen():
    table = "".join(f"| [{name}]({name}) | what |\n" for name in ("a.py", "b.py", "b.py", "gone.py"))
    tests = ["run('a.py')", "'Says something of new.py.'\nIN_TURN = {'b.py': 1}"]
    assert overlooked(["a.py", "b.py", "new.py"], table, tests) == [
        "b.py is not in the table once",
        "new.py is not in the table once",
        "gone.py is in the table and is not there",
        "new.py is run by no test",
    ]
