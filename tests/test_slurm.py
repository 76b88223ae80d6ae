"""Jobs under a real Slurm of two nodes: they train as one process does, fail, are preempted, and say what they see."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import needs, slurm, spmd
from tests.helpers.jobs import job

pytestmark = needs.slurm

CASES = "tests.training.all_cases:CASES"
TRAINED = ("two_optimizers",)

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
        time.sleep(0.3 if "slow" in sys.argv else 0.02)
x = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
with kdist.scope(scale_lr=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    callbacks = [kdist.callbacks.BackupAndRestore(folder / "backup"), kdist.callbacks.Preemption(), Steps()]
    if "kill" in sys.argv:
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
    done = job("slurm", 2).run(CASES, only=TRAINED, timeout=180, env=cluster.env)
    done.check()
    assert "2 ranks train together over collective, started by Slurm without MPI" in done.outputs[0], done.outputs[0]


def test_ranks_train_as_one_process_over_pmix(cluster: slurm.Slurm) -> None:
    done = job("slurm pmix", 2).run(CASES, only=TRAINED, timeout=180, env=cluster.env)
    done.check()
    assert "2 ranks train together over mpi, started by Slurm" in done.outputs[0], done.outputs[0]


def test_ranks_agree_on_how_they_talk_where_a_node_lacks_an_mpi(
    cluster: slurm.Slurm, script: Path, tmp_path: Path
) -> None:
    train = shlex.join([sys.executable, str(script), str(tmp_path)])
    lacks = "MPI4PY_LIBMPI=/nowhere/libmpi.so"  # mpi4py is there, and finds no MPI
    task = f"if [ $SLURM_PROCID = 1 ]; then export {lacks}; fi; exec {train}"
    done = spmd.launch(["bash", "-c", task], 2, launcher="srun_pmi2", env=cluster.env, timeout=120)
    assert done.returncode == 0, done.output
    assert "the nodes differ in what they have" in done.output, done.output
    talk = "2 ranks train together over collective, started by Slurm, whose nodes differ: mpi on n0; collective on n1"
    assert talk in done.output, done.output
    assert len(losses(done.output)) == 2


def test_a_rank_that_is_killed_in_training_ends_the_step(cluster: slurm.Slurm, script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), str(tmp_path), "kill"]
    env = {**cluster.env, "KDIST_STRATEGY": "collective"}
    done = spmd.launch(command, 2, launcher="srun", env=env)
    waited = time.time() - (tmp_path / "steps1").stat().st_mtime
    assert not done.timed_out, done.output
    assert done.returncode != 0, done.output
    assert "task 1: Killed" in done.output, done.output
    # What rank 0 finds by its connections, or the failure detector by the heartbeats, whichever is first.
    assert re.search(r"rank 1 (at 127.0.0.2:\d+ has ended|died without an error message)", done.output), done.output
    assert waited < 10 * spmd.PATIENCE, done.output


def test_a_rank_that_fails_before_the_scope_ends_the_step_after_the_wait_of_srun(cluster: slurm.Slurm) -> None:
    """As the guide says of `srun --wait`: the other rank would wait for ten minutes."""
    program = "import os, kdist\nassert os.environ['SLURM_PROCID'] == '0', 'no data here'\nwith kdist.scope(): pass"
    env = {**cluster.env, "SLURM_WAIT": "5"}  # `--wait=5`
    done = spmd.launch([sys.executable, "-c", program], 2, launcher="srun", env=env)
    assert not done.timed_out, done.output
    assert done.returncode != 0, done.output
    assert "AssertionError: no data here" in done.output, done.output
    assert done.seconds < 60 * spmd.PATIENCE, done.output


class Batch:
    """A batch job that was submitted.

    Args:
        cluster: `Slurm`.
        output: path, where what it says goes.
        command: sequence of str, after `sbatch`.
    """

    def __init__(self, cluster: slurm.Slurm, output: Path, *command: str) -> None:
        env = {
            **spmd.RANK_ENVIRONMENT,
            "KDIST_VENV": str(Path(sys.executable).parents[1]),
            "SLURM_MPI_TYPE": "none",  # on one host, two nodes' PMIx servers clash
        }
        sizes = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
        self._cluster, self._output = cluster, output
        self.number = cluster.ask("sbatch", "--parsable", *sizes, f"--output={output}", *command, env=env).strip()

    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def state(self) -> str:
        wanted = ("--noheader", "--states=all", "--format=%T %r", f"--jobs={self.number}")
        return self._cluster.ask("squeue", *wanted).strip()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        limit, failed = time.monotonic() + 120 * spmd.PATIENCE, 0
        while not is_so():
            failed = failed + 1 if self.state().startswith("FAILED") else 0
            # For a moment, a job that is started again has failed.
            assert failed < 50, f"{self.said()}\n{self._cluster.logs()}"
            assert time.monotonic() < limit, f"{self.state()}\n{self.said()}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(cluster: slurm.Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the losses of a training that nothing interrupts, by `kdist run` in a batch script of two nodes."""
    folder = tmp_path_factory.mktemp("whole")
    script = folder / "train.py"
    script.write_text(TRAIN)
    run = shlex.join([sys.executable, "-m", "kdist.cli.main", "run", str(script), str(folder)])
    job = Batch(cluster, folder / "output", f"--wrap={run}")
    job.wait_for(lambda: job.state().startswith("COMPLETED"))
    said = job.said()
    assert "kdist: -np 2, by SLURM_NTASKS=2" in said, said
    assert "2 ranks train together over mpi, started by Open MPI" in said, said
    return losses(said)[0]


def test_a_batch_job_that_is_preempted_goes_on(
    cluster: slurm.Slurm, script: Path, tmp_path: Path, whole: list[float]
) -> None:
    """The example's batch script starts itself again after code 75, and ends as `kdist run` in an allocation does.

    This Slurm has no `RequeueExit`, by which it would do so itself.
    """
    job = Batch(cluster, tmp_path / "output", "examples/clusters/slurm.sh", str(script), str(tmp_path))
    job.wait_for(lambda: steps(tmp_path) > 10)
    cluster.ask("scancel", "--signal=USR1", job.number)
    job.wait_for(lambda: job.state() == "PENDING BeginTime")
    assert steps(tmp_path) < 160
    assert "exiting with code 75" in job.said(), job.said()
    # Slurm would wait for two minutes; within a second, the nodes take the job for the one that they have ended.
    time.sleep(2)
    cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.wait_for(lambda: job.state().startswith("COMPLETED"))
    said = job.said()
    assert "training resumes from" in said, said
    assert steps(tmp_path) == 160
    assert re.search(r"0: +training +2 ranks together, all-reduce over collective: started by Slurm", said), said
    assert losses(said) == [pytest.approx(whole, rel=1e-5)] * 2


def test_a_job_at_its_time_limit_has_saved_and_the_next_goes_on(
    cluster: slurm.Slurm, script: Path, tmp_path: Path, whole: list[float]
) -> None:
    """Slurm's own limit: two SIGTERM within milliseconds, SIGKILL after KillWait, and no second start of the job."""

    def train(*words: str) -> str:
        command = [sys.executable, str(script), str(tmp_path), *words]
        return f"--wrap=srun --cpu-bind=none {shlex.join(command)}"

    first = Batch(cluster, tmp_path / "first", "--time=10", train("slow"))
    first.wait_for(lambda: steps(tmp_path) > 3)
    cluster.ask("scontrol", "update", f"JobId={first.number}", "EndTime=now")  # Slurm looks twice a minute
    first.wait_for(lambda: first.state() == "TIMEOUT TimeLimit")
    assert 3 < steps(tmp_path) < 160
    assert "SIGTERM on rank 0, SIGTERM on rank 1: saved after step" in first.said(), first.said()
    second = Batch(cluster, tmp_path / "second", "--time=10", train())
    second.wait_for(lambda: second.state().startswith("COMPLETED"))
    assert "training resumes from" in second.said(), second.said()
    assert steps(tmp_path) == 160
    assert losses(second.said()) == [pytest.approx(whole, rel=1e-5)] * 2
