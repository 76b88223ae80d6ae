"""Two network namespaces, each with an address of its own, joined by a cable: what two hosts are to TCP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import spmd

ADDRESSES = ("10.231.77.1", "10.231.77.2")
NETWORK = "10.231.77.0/24"

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


# Trains until it is ended, and says how far it is, and what came of its first epoch.
ENDLESS = """
import sys, time
from pathlib import Path
import keras, numpy as np
import kdist
class Marks(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        Path(sys.argv[1], f"step{kdist.rank()}").write_text(str(self.steps))
        time.sleep(0.02)
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            Path(sys.argv[1], f"epoch{kdist.rank()}").write_text(f"{kdist.local_size()} {logs['loss']}")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with kdist.scope(stall_timeout=float(sys.argv[2])):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x.sum(1), batch_size=8, epochs=1_000_000, verbose=0, callbacks=[Marks()])
"""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


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
            add_another_network(name)
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if isinstance(error, FileNotFoundError) and "KDIST_TEST_SLURM" in os.environ:
            raise  # `tests/run` installs it
        pytest.skip(f"this machine forbids network namespaces: {getattr(error, 'stderr', None) or error}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def add_another_network(host: str) -> None:
    """Gives a host a second network, as Docker's: all hosts have the same address there, and none reaches another."""
    ip("-n", host, "link", "add", "docker0", "type", "veth", "peer", "name", "container0")
    ip("-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    for end in ("docker0", "container0"):
        ip("-n", host, "link", "set", end, "up")


# What mpirun starts its daemons by, in the place of ssh: the other host has a name of its own too.
AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
shift  # the host's address
exec ip netns exec {other} unshare --uts sh -c "hostname {other}; $*"
"""


def of_tf_config(hosts: list[str], script: Path, *arguments: object) -> list[str]:
    """Returns the command that runs a worker on each host; what they say goes to files beside the script."""
    workers = [f"{address}:21000" for address in ADDRESSES]
    lines = []
    for index, name in enumerate(hosts):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        worker = shlex.join(map(str, ["ip", "netns", "exec", name, sys.executable, script, *arguments]))
        lines.append(f"TF_CONFIG='{config}' {worker} > {script.parent}/rank{index}.out 2>&1 &\n")
    lines.append("status=0; for job in $(jobs -p); do wait $job || status=1; done; exit $status\n")
    return ["bash", "-c", "".join(lines)]


def of_mpi(hosts: list[str], script: Path, *arguments: object) -> list[str]:
    """Returns the command by which `kdist run` starts a rank on each host."""
    agent = script.parent / "agent.sh"
    agent.write_text(AGENT.format(other=hosts[1]))
    agent.chmod(0o755)
    command = ["ip", "netns", "exec", hosts[0], sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"]
    command += ["-H", ",".join(f"{address}:1" for address in ADDRESSES)]
    # Open MPI would take the network that all hosts have, and wait for ever.
    command += ["--launcher-args", f"--prtemca plm_ssh_agent {agent} --mca btl_tcp_if_include {NETWORK}"]
    return [*command, "--output", str(script.parent), str(script), *map(str, arguments)]


def of_rendezvous(hosts: list[str], script: Path, *arguments: object) -> list[str]:
    """Returns the command by which `kdist run` is started on each host, without MPI or ssh."""
    lines = []
    for index, name in enumerate(hosts):
        node = ["--rendezvous", f"{ADDRESSES[0]}:21100", "--nnodes", "2", "--node-rank", str(index), "-np", "1"]
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "kdist.cli.main", "run", *node]
        lines.append(shlex.join([*command, "--output", str(script.parent), str(script), *map(str, arguments)]) + " &\n")
    lines.append("status=0; for job in $(jobs -p); do wait $job || status=1; done; exit $status\n")
    return ["bash", "-c", "".join(lines)]


UNWATCHED = "hang are not detected"  # where heartbeats do not find their way

# Under kdist run the launcher is to notice first that a host is gone: it waits for it to end its ranks.
STALL = {"TF_CONFIG": 12, "kdist run": 80}
WAYS = {"TF_CONFIG": of_tf_config, "kdist run": of_mpi}


def test_ranks_that_meet_train_across_hosts(hosts: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    finished = spmd.execute(of_rendezvous(hosts, script), env=spmd.RANK_ENVIRONMENT, timeout=240)
    outputs = [(tmp_path / f"rank{rank}.out").read_text() for rank in range(2)]
    assert finished.returncode == 0, [finished.output, *outputs]
    trained = [re.search(r"trained (\d) (\d) (.*)", output) for output in outputs]
    assert [match.groups()[:2] for match in trained if match] == [("0", "1"), ("1", "1")], outputs
    assert len({match.group(3) for match in trained if match}) == 1
    assert UNWATCHED not in f"{finished.output} {outputs}"


def steps(folder: Path) -> int:
    """Returns how many steps the slower rank has made."""
    texts = [file.read_text() if (file := folder / f"step{rank}").exists() else "" for rank in range(2)]
    return min(int(text or 0) for text in texts)


def wait_for(folder: Path, count: int, what: str) -> None:
    deadline = time.monotonic() + 120
    while steps(folder) < count:
        assert time.monotonic() < deadline, f"{steps(folder)} steps, no {count} {what}"
        time.sleep(0.2)


@pytest.mark.parametrize("way", WAYS)
def test_a_cable_that_is_cut(way: str, hosts: list[str], tmp_path: Path) -> None:
    """Both ranks train; for five seconds they wait, and go on; for good they end, and the lost rank is named."""
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    cable = ip("-n", hosts[0], "-o", "addr", "show", "to", ADDRESSES[0]).split()[1]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        job = pool.submit(
            spmd.execute, WAYS[way](hosts, script, tmp_path, STALL[way]), env=spmd.RANK_ENVIRONMENT, timeout=240
        )
        wait_for(tmp_path, 20, "before the cut")
        one, other = ((tmp_path / f"epoch{rank}").read_text() for rank in range(2))
        ip("-n", hosts[0], "link", "set", cable, "down")
        time.sleep(5)
        before = steps(tmp_path)
        ip("-n", hosts[0], "link", "set", cable, "up")
        wait_for(tmp_path, before + 50, "after the cut")
        ip("-n", hosts[0], "link", "set", cable, "down")
        finished = job.result()
    said = "\n".join([finished.output, *[file.read_text() for file in sorted(tmp_path.glob("rank*"))]])
    assert one == other
    assert one.startswith("1 ")
    assert UNWATCHED not in said, said
    assert not finished.timed_out, said
    assert finished.returncode != 0, said
    lost = "rank 1 sends no heartbeat" if way == "TF_CONFIG" else "was lost; the job's exit code is"
    assert lost in said, said
