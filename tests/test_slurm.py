"""Jobs under a real Slurm of two nodes: they train as one process does, fail, are preempted, and say what they see."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import needs, slurm, spmd
from tests.helpers.jobs import job

pytestmark = needs.slurm

CASES = "tests.training.all_cases:CASES"
OVER_TCP = ("two_optimizers", "exact_metrics")
OVER_MPI = ("two_optimizers",)

# Each rank counts its steps in a file, which a test waits for.
TRAIN = """
import sys, time
from pathlib import Path
import keras, numpy as np
import kdist
folder = Path(sys.argv[1])
class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with (folder / f"steps{kdist.rank()}").open("a") as file:
            file.write(".")
        time.sleep(0.02)
x = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
with kdist.scope(scale_lr=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    callbacks = [kdist.callbacks.BackupAndRestore(folder / "backup"), kdist.callbacks.Preemption(), Steps()]
    if "fault" in sys.argv:
        callbacks.append(kdist.testing.Fault("kill", rank=1, step=10))
    history = model.fit(x, x.sum(1), batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
print("trained", kdist.rank(), *history.history["loss"], flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    with slurm.running() as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def steps(folder: Path) -> int:
    """Returns how many steps rank 0 has made."""
    path = folder / "steps0"
    return path.stat().st_size if path.exists() else 0


def losses(said: str) -> list[list[float]]:
    """Returns the losses of each rank that has trained to the end, in rank order."""
    found = re.findall(r"trained (\d) (.*)", said)
    return [[float(each) for each in text.split()] for _, text in sorted(found)]


def test_ranks_of_two_nodes_train_as_one_process_without_mpi(cluster: slurm.Slurm) -> None:
    done = job("slurm", 2).run(CASES, only=OVER_TCP, timeout=180, env=cluster.env)
    done.check()
    assert "2 ranks train together over collective, started by Slurm without MPI" in done.outputs[0], done.outputs[0]


def test_ranks_train_as_one_process_over_pmix(cluster: slurm.Slurm) -> None:
    done = job("slurm pmix", 2).run(CASES, only=OVER_MPI, timeout=180, env=cluster.env)
    done.check()
    assert "2 ranks train together over mpi, started by Slurm" in done.outputs[0], done.outputs[0]


@needs.intel_mpi
def test_ranks_of_two_nodes_train_as_one_process_over_pmi2(cluster: slurm.Slurm) -> None:
    done = job("slurm pmi2", 2).run(CASES, only=OVER_MPI, timeout=180, env=cluster.env)
    done.check()
    assert "2 ranks train together over mpi, started by Slurm" in done.outputs[0], done.outputs[0]


def test_a_rank_that_is_killed_ends_the_step(cluster: slurm.Slurm, script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), str(tmp_path), "fault"]
    env = {**cluster.env, "KDIST_STRATEGY": "collective"}
    done = spmd.launch(command, 2, launcher="srun", env=env)
    waited = time.time() - (tmp_path / "steps1").stat().st_mtime
    assert not done.timed_out, done.output
    assert done.returncode != 0, done.output
    assert "task 1: Killed" in done.output, done.output
    assert re.search(r"rank 1 at 127.0.0.2:\d+ has ended", done.output), done.output
    assert waited < 10 * spmd.PATIENCE, done.output


def test_a_batch_job_that_is_preempted_goes_on(cluster: slurm.Slurm, script: Path, tmp_path: Path) -> None:
    """The example's batch script starts again after exit code 75, and ends as `kdist run` in an allocation does."""
    output = tmp_path / "output"
    sizes = ("--ntasks-per-node=1", "--cpus-per-task=1")
    env = {
        **spmd.RANK_ENVIRONMENT,
        "KDIST_VENV": str(Path(sys.executable).parents[1]),
        "SLURM_MPI_TYPE": "none",  # on one host, two nodes' PMIx servers clash
    }
    submit = ["sbatch", "--parsable", *sizes, f"--output={output}", "examples/clusters/slurm.sh"]
    number = cluster.ask(*submit, str(script), str(tmp_path), env=env).strip()

    def said() -> str:
        return output.read_text() if output.exists() else ""

    def state() -> str:
        return cluster.ask("squeue", "--noheader", "--states=all", "--format=%T %r", f"--jobs={number}").strip()

    def wait_for(is_so: Callable[[], bool]) -> None:
        limit, failed = time.monotonic() + 120 * spmd.PATIENCE, 0
        while not is_so():
            failed = failed + 1 if state().startswith("FAILED") else 0
            assert failed < 50, f"{said()}\n{cluster.logs()}"  # for a moment, a job that is started again has failed
            assert time.monotonic() < limit, f"{state()}\n{said()}"
            time.sleep(0.1)

    wait_for(lambda: steps(tmp_path) > 10)
    cluster.ask("scancel", "--signal=USR1", number)
    wait_for(lambda: state() == "PENDING BeginTime")
    stopped_at = steps(tmp_path)
    assert stopped_at < 160
    assert "exiting with code 75" in said(), said()
    # Slurm would wait for two minutes; within a second, the nodes take the job for the one that they have ended.
    time.sleep(2)
    cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_for(lambda: state().startswith("COMPLETED"))
    assert "training resumes from" in said(), said()
    assert steps(tmp_path) == 160
    assert re.search(r"0: +training +2 ranks together, all-reduce over collective: started by Slurm", said()), said()

    whole = tmp_path / "whole"
    whole.mkdir()
    command = [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2", str(script), str(whole)]
    done = cluster.run("salloc", "--nodes=2", "--ntasks=2", *command)
    assert done.returncode == 0, done.output
    assert "2 ranks train together over mpi, started by Open MPI" in done.output, done.output
    assert losses(said()) == [pytest.approx(losses(done.output)[0], rel=1e-5)] * 2
