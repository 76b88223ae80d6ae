"""`kdist env`: what a bug report needs."""

import sys

from tests.helpers import spmd

COMMAND = [sys.executable, "-m", "kdist.cli.main", "env"]


def test_what_a_bug_report_needs():
    from tests.cluster import environments

    done = spmd.execute(COMMAND, env={**environments.OPENMPI_5, "KDIST_STRATEGY": "mpi"}, timeout=120)
    assert done.returncode == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.startswith("  ")}
    for name in ("python", "tensorflow", "keras", "numpy", "mpi4py", "mpirun", "cores", "CPU", "because", "training"):
        assert name in lines, done.output
    assert "1 of 2" in lines["rank"]
    assert "OMPI_COMM_WORLD_SIZE=2" in lines["because"]
    assert "KDIST_STRATEGY" in lines["strategy"]
    assert "2 ranks together, all-reduce over mpi" in lines["training"]
    assert "not slurm" in done.output
    assert "oneDNN" not in done.output


def test_invalid_variables_are_shown():
    done = spmd.execute(COMMAND, env={"TF_CONFIG": "{"}, timeout=120)
    assert done.returncode == 2
    assert "TF_CONFIG='{'" in done.output
    assert "Traceback" not in done.output


def test_a_backend_that_keras_does_not_know_leaves_the_rest():
    done = spmd.execute(COMMAND, env={"KERAS_BACKEND": "tensorflw"}, timeout=120)
    assert "import failed" in done.output
    assert "because" in done.output
    assert "Traceback" not in done.output
