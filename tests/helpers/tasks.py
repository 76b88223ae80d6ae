"""The tasks of a cluster on this machine, one process each, started with a TF_CONFIG by name."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kdist.launchers.hosts.ports import free_ports
from tests.helpers import spmd


class Tasks:
    """A chief, workers, ps and evaluators, each a process that runs the same program.

    Args:
        directory: path, where what each task says is kept.
        program: sequence of str, the arguments for Python.
        workers: int, how many workers.
        ps: int, how many ps.
        evaluators: int, how many evaluators the cluster lists; one that is not listed may be started, too.
        without: names of tasks, as `"worker 1"`, that are not started.
        env: mapping, environment variables on top of `RANK_ENVIRONMENT`.
    """

    def __init__(
        self,
        directory: Path,
        program: Sequence[str],
        *,
        workers: int = 2,
        ps: int = 1,
        evaluators: int = 0,
        without: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.env = dict(env or {})
        self.program = list(program)
        ports = iter(free_ports(1 + workers + ps + evaluators))
        self.cluster = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for job, count in (("chief", 1), ("worker", workers), ("ps", ps), ("evaluator", evaluators))
            if count
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for job, addresses in self.cluster.items():
            for index in range(len(addresses)):
                if f"{job} {index}" not in without:
                    self.start(f"{job} {index}")

    def start(self, name: str) -> None:
        """Starts a task, for the first time or again."""
        job, index = name.split()
        config = {"cluster": self.cluster, "task": {"type": job, "index": int(index)}}
        env = {**os.environ, **spmd.RANK_ENVIRONMENT, **self.env, "TF_CONFIG": json.dumps(config)}
        with open(self.directory / f"{name}.said", "a") as said:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *self.program], env=env, cwd=spmd.ROOT, stdout=said, stderr=said
            )

    def said(self, name: str) -> str:
        """Returns what a task has said so far."""
        return (self.directory / f"{name}.said").read_text()

    def everything_said(self) -> str:
        """Returns what all tasks have said."""
        return "\n".join(f"--- {name}:\n{self.said(name)[-3000:]}" for name in self.processes)

    def kill(self, name: str) -> None:
        """Kills a task by SIGKILL."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self, name: str) -> None:
        """Stops a task by SIGSTOP: it is there, and does nothing."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def listens(self, name: str) -> bool:
        """Returns whether a task listens at its address."""
        job, index = name.split()
        host, port = self.cluster[job][int(index)].split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def wait_until(self, condition: Callable[[], bool], limit: float) -> None:
        """Waits for something that the chief does, while it lives."""
        deadline = time.monotonic() + limit
        while not condition():
            assert self.processes["chief 0"].poll() is None, self.everything_said()
            assert time.monotonic() < deadline, self.everything_said()
            time.sleep(0.05)

    def codes(self, *names: str, limit: float) -> list[int | None]:
        """Returns the exit codes of tasks, all by default."""
        deadline = time.monotonic() + limit
        for name in names or self.processes:
            try:
                self.processes[name].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end\n{self.everything_said()}") from None
        return [self.processes[name].returncode for name in names or self.processes]

    def end(self) -> None:
        """Ends all that still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
