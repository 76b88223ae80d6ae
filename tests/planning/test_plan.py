"""`kdist.plan` counts exactly; `kdist plan` runs a script up to its first `fit`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

import kdist
from kdist.cli import main as cli
from kdist.errors import KDistError
from kdist.planning.weights import unallocated
from tests.helpers import spmd

SCRIPT = """
import keras, numpy as np, kdist

with kdist.scope():
    model = keras.Sequential([keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.zeros((64, 600), "float32"), np.zeros((64, 1), "float32"), batch_size=16)
print("TRAINED")
"""
WEIGHTS = 4 * (600 * 512 + 512 + 512 + 1)


def model_of(optimizer):
    model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(("optimizer", "times"), [("adam", 2), ("sgd", 0), ("adagrad", 1)])
def test_weights_and_slots_are_exact_and_the_optimizer_is_left_alone(optimizer, times):
    model = model_of(optimizer)
    sizes = kdist.plan(model, batch_size=8, ranks=2).sizes
    assert sizes.weights == sizes.trained == WEIGHTS
    assert 0 <= sizes.slots - times * WEIGHTS <= 32  # the learning rate and the iterations
    assert sizes.row >= 4 * 513
    assert not model.optimizer.built


def test_large_weights_are_not_allocated():
    with unallocated():
        layer = keras.layers.Dense(10**6)
        layer.build((None, 10**6))  # 4 TB
    assert tuple(layer.kernel.shape) == (10**6, 10**6)


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(KDistError, match=r"model\.compile"):
        kdist.plan(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), batch_size=8, ranks=2)


def test_a_model_without_inputs_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(KDistError, match=r"kdist plan script\.py"):
        kdist.plan(model, batch_size=8, ranks=2)


def planned(tmp_path, source, *options):
    (tmp_path / "train.py").write_text(source)
    command = [sys.executable, "-m", "kdist", "plan", "-np", "2", *options, str(tmp_path / "train.py")]
    return spmd.execute(command, timeout=200)


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_that_does_not_fit_is_planned_and_not_trained(tmp_path):
    script = SCRIPT.replace("kdist.scope()", 'kdist.scope("mpi", micro_batches=3)')
    done = planned(tmp_path, script, "--memory", "10MB", "--json")
    assert done.returncode == 3, done.output
    assert "TRAINED" not in done.output
    found = json.loads(done.output[done.output.index("{") :])
    (whole, _) = (each["ranks"][0] for each in found["strategies"])
    assert whole["weights"] == WEIGHTS
    assert whole["data"] == 2 * 64 * 601 * 4  # the script's arrays, and the tensors that Keras makes of them
    assert (found["batch_size"], found["rows"]) == (16, 24)  # three batches on two ranks
    assert found["activations"] == "measured"
    assert all("Fix" not in each["advice"] and each["advice"] for each in found["strategies"])


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_without_a_scope_is_told_what_to_do(tmp_path):
    done = planned(tmp_path, SCRIPT.replace("with kdist.scope():", "if True:"))
    assert done.returncode == 2, done.output
    assert "outside of kdist.scope()" in done.output
    assert "train.py:7" in done.output
    assert "TRAINED" not in done.output


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_that_fits_nothing_is_told_what_to_do(tmp_path):
    done = planned(tmp_path, "import kdist")
    assert done.returncode == 2, done.output
    assert "The script trained no model" in done.output


def test_tables_are_counted_and_proposed():
    layers = [keras.layers.Embedding(100_000, 32), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,), dtype="int64"), *layers])
    model.compile("adam", "mse")
    table = 4 * 100_000 * 32
    plan = kdist.plan(model, batch_size=8, ranks=4, memory=int(2.5 * table))
    assert plan.sizes.tables == table
    share = next(each for each in plan.shares if each.strategy == "shard_embeddings")
    rest = plan.sizes.weights - table
    assert share.weights == table // 4 + rest
    assert share.gradients == share.weights
    assert abs(share.slots - 2 * share.weights) <= 32
    assert plan.advice("all-reduce") == "shard_embeddings=1e6"
    both = next(each for each in plan.shares if each.strategy == "both in parts")
    assert (both.weights, both.gradients) == (share.weights, share.gradients)
    assert abs(both.slots - plan.sizes.slots / 4) <= 1
    assert abs(both.messages - rest / 4) <= 1
    layers.append(keras.layers.Dense(100_000))
    wide = keras.Sequential([keras.Input((4,), dtype="int64"), *layers])
    wide.compile("adam", "mse")
    plan = kdist.plan(wide, batch_size=8, ranks=64, memory="10MB")
    for strategy in ("all-reduce", 'shard="optimizer"'):
        assert plan.advice(strategy) == 'shard="optimizer", shard_embeddings=1e6'
    model.compile(keras.optimizers.Lamb(), "mse")  # which needs whole tables
    assert "shard_embeddings" not in str(kdist.plan(model, batch_size=8, ranks=4))


@pytest.mark.starts_processes
@pytest.mark.timeout(100)
def test_a_script_that_takes_too_long_is_ended(tmp_path):
    done = planned(tmp_path, "import time; time.sleep(600)", "--timeout", "3")
    assert done.returncode == 2, done.output
    assert "took too long" in done.output
    assert "Fix: --timeout" in done.output


@pytest.mark.starts_processes
def test_a_plan_that_is_ended_leaves_nothing_behind(tmp_path):
    """In a signal's handler Python would not end the script, which runs in a session of its own."""
    script = tmp_path / "train.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-m", "kdist", "plan", "-np", "2", str(script)], env={**os.environ, **spmd.LEAN}
    )
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < limit
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--memory", "24XB", "train.py"], "24XB"), (["no_such.py"], "no_such.py"), ([], "nothing to plan")],
)
def test_wrong_arguments_are_refused(arguments, words, capsys):
    assert cli.main(["plan", "-np", "2", *arguments]) == 2
    text = capsys.readouterr().err
    for word in [words, "Received", "Expected", "Fix: "]:
        assert word in text
