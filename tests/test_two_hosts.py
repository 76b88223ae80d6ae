"""Two network namespaces, each with an address of its own, joined by a cable: what two hosts are to TCP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import spmd

ADDRESSES = ("10.231.77.1", "10.231.77.2")

SCRIPT = """
import keras, numpy as np
import kdist
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with kdist.scope() as strategy:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0)
info = kdist.cluster_info()
print("trained", info.rank, info.local_size, history.history["loss"])
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    mark = uuid.uuid4().hex[:6]
    names = [f"kdist{mark}a", f"kdist{mark}b"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            f"ka{mark}",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"kb{mark}",
            "netns",
            names[1],
        )
        for name, cable, address in zip(names, (f"ka{mark}", f"kb{mark}"), ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"this machine forbids network namespaces: {getattr(error, 'stderr', None) or error}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_workers_of_tf_config_train_across_hosts(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    workers = [f"{address}:21000" for address in ADDRESSES]
    lines = []
    for index, name in enumerate(hosts):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        worker = f"ip netns exec {name} {sys.executable} {tmp_path / 'train.py'}"
        lines.append(f"TF_CONFIG='{config}' {worker} > {tmp_path}/{index}.log 2>&1 &\n")
    lines.append("status=0; for job in $(jobs -p); do wait $job || status=1; done; exit $status\n")
    finished = spmd.execute(["bash", "-c", "".join(lines)], env=spmd.RANK_ENVIRONMENT, timeout=240)
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(2)]
    assert finished.returncode == 0, logs
    trained = [re.search(r"trained (\d) (\d) (.*)", log) for log in logs]
    assert [match.groups()[:2] for match in trained if match] == [("0", "1"), ("1", "1")], logs
    assert len({match.group(3) for match in trained if match}) == 1


# What mpirun starts its daemons by, in the place of ssh: the other host has a name of its own too.
AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
shift  # the host's address
exec ip netns exec {other} unshare --uts sh -c "hostname {other}; $*"
"""


def test_kdist_run_starts_ranks_across_hosts(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    agent = tmp_path / "agent.sh"
    agent.write_text(AGENT.format(other=hosts[1]))
    agent.chmod(0o755)
    command = ["ip", "netns", "exec", hosts[0], sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"]
    command += ["-H", ",".join(f"{address}:1" for address in ADDRESSES)]
    command += ["--launcher-args", f"--prtemca plm_ssh_agent {agent}"]
    command += ["--output", str(tmp_path), str(tmp_path / "train.py")]
    finished = spmd.execute(command, env=spmd.RANK_ENVIRONMENT, timeout=240)
    assert finished.returncode == 0, finished.output
    outputs = [(tmp_path / f"rank{rank}.out").read_text() for rank in range(2)]
    trained = [re.search(r"trained (\d) (\d) (.*)", output) for output in outputs]
    assert [match.groups()[:2] for match in trained if match] == [("0", "1"), ("1", "1")], outputs
    assert len({match.group(3) for match in trained if match}) == 1
