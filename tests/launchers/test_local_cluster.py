"""The launcher of a cluster on this machine: the TF_CONFIG of each rank, and how the job ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdist.cluster import detect
from kdist.errors import LaunchError
from kdist.launchers import local_cluster

ROOT = Path(__file__).parents[2]
RANK = "import json, os; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "


def start(code: str, ranks: int = 3, ps: int = 0) -> subprocess.Popen[str]:
    command = local_cluster.build(
        sys.executable, [sys.executable, "-c", RANK + code], np=ranks, ps=ps, env={"KDIST_TEST": "7"}
    )
    return subprocess.Popen(
        command.argv,
        env={**os.environ, **command.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output


def test_each_rank_is_a_task_of_one_cluster() -> None:
    infos = [detect({"TF_CONFIG": config}) for config in local_cluster.configurations(3)]
    assert [(info.rank, info.size, info.local_rank, info.local_size) for info in infos] == [
        (r, 3, r, 3) for r in range(3)
    ]
    assert len({json.dumps(info.cluster_spec) for info in infos}) == 1
    assert len(set(infos[0].cluster_spec["worker"])) == 3


def test_ranks_that_succeed() -> None:
    process = start("os.write(1, f'rank {rank} {os.environ[\"KDIST_TEST\"]}\\n'.encode())")
    assert sorted(ended(process).splitlines()) == ["rank 0 7", "rank 1 7", "rank 2 7"]
    assert process.returncode == 0


def test_the_first_failure_ends_the_job_with_its_exit_code() -> None:
    started = time.monotonic()
    process = start("import sys, time; rank == 1 and sys.exit(7); time.sleep(300)")
    assert "rank 1 of 3 exited with code 7" in ended(process)
    assert process.returncode == 7
    assert time.monotonic() - started < 60


def test_a_job_with_parameter_servers_succeeds_with_its_chief() -> None:
    """A worker that was started again may find no chief any more, and wait for it."""
    task = "task = json.loads(os.environ['TF_CONFIG'])['task']['type']; import time; "
    process = start(task + "time.sleep(0 if task == 'chief' else 600)", ps=1)
    began = time.monotonic()
    ended(process)
    assert process.returncode == 0
    assert time.monotonic() - began < 60


def test_a_rank_that_a_signal_kills_is_named() -> None:
    process = start("import time; rank == 2 and os.kill(os.getpid(), 9); time.sleep(300)")
    assert "rank 2 of 3 was killed by signal 9 (SIGKILL)" in ended(process)
    assert process.returncode == 128 + 9


def test_a_signal_to_the_launcher_ends_the_ranks() -> None:
    process = start("import time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(300)", ranks=2)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(LaunchError, match="-np 0.*Fix"):
        local_cluster.build(sys.executable, ["train.py"], np=0, env={})
