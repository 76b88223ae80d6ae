"""Rank, barrier and `chief_first`, before TensorFlow starts and in one process; on three ranks: `process_cases.py`."""

from __future__ import annotations

import json
import os
import sys

import pytest

import kdist
from kdist import _engine
from kdist.errors import ScopeError
from tests.helpers import spmd


def test_the_engine_is_opened_before_the_body_of_chief_first():
    """Variables that exist before TensorFlow's cluster starts become invalid."""
    script = """
import kdist, tensorflow as tf
with kdist.chief_first():
    if kdist.is_chief():
        made = tf.Variable(1.0)
with kdist.scope() as strategy:
    print("made", kdist.rank(), strategy.num_replicas_in_sync)
"""
    done = spmd.launch([sys.executable, "-c", script], 2, launcher="local_cluster")
    assert done.returncode == 0, done.output
    assert {"made 0 2", "made 1 2"} <= set(done.output.splitlines())


def test_one_process_does_not_wait():
    assert (kdist.rank(), kdist.size(), kdist.is_chief()) == (0, 1, True)
    kdist.barrier()
    with kdist.chief_first():
        pass


def test_a_barrier_of_parameter_servers_is_refused(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setattr(_engine, "_opened", _engine._Opened())  # another test may have opened this process's engine
    with pytest.raises(ScopeError, match="no collectives"):
        kdist.barrier()


@pytest.fixture
def task(monkeypatch):
    """Makes this process rank 0 of a step over two nodes, whose other rank never comes."""
    variables = {
        "SLURM_CLUSTER_NAME": f"test{os.getpid()}",
        "SLURM_JOB_ID": "78",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,127.0.0.2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "PMI_RANK": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_engine, "_opened", _engine._Opened())
    monkeypatch.setattr(_engine, "_AGREE_TIMEOUT", 0.5)
    return kdist.cluster_info()


def test_nodes_that_cannot_meet_take_what_they_have(task, caplog):
    assert _engine.select_together("auto", task).strategy == "mpi"
    assert "the nodes could not compare how their ranks talk: rank 0 takes mpi" in caplog.text
    assert "rank 1 is missing" in caplog.text
    caplog.clear()
    assert _engine.select_together("auto", task).strategy == "mpi"
    assert not caplog.text  # they tried once


def test_what_is_asked_for_is_not_compared(task, caplog):
    assert _engine.select_together("collective", task).strategy == "collective"
    assert not caplog.text
