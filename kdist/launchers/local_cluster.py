"""The launcher of a TensorFlow cluster: N ranks by TF_CONFIG, without MPI.

It replaces `mpirun`: it starts the ranks, ends all of them when one fails, and exits with the code of that one. The
ranks are on this machine, or with `--nnodes` on several, on each of which it is started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from kdist.errors import LaunchError
from kdist.launchers.command import Command
from kdist.launchers.hosts.host import check_slots
from kdist.launchers.hosts.ports import free_ports
from kdist.launchers.nodes import START_TIMEOUT, Node, joined
from kdist.launchers.process import stop_signals
from kdist.launchers.start import module_command
from kdist.restarts.events import Failure, Kind, append_failure
from kdist.restarts.launcher_words import killed_by

_LOG = logging.getLogger("kdist")
_MAX_RESTARTS = 10  # of each rank that can be replaced
_PEER_FAILED = signal.SIGUSR2
_OF_A_TASK = ("SLURM_STEP", "SLURM_PROCID", "PMI_", "PMI2_", "PMIX_")  # prefixes of what srun sets for each
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_GRACE_AFTER_CHIEF = 10.0  # seconds for workers of parameter servers

# The running ranks by process id. `subprocess` reaps a `Popen` without references when it makes the next one.
_Ranks = dict[int, tuple[int, "subprocess.Popen[bytes]"]]


def build(
    python: str,
    program: Sequence[str],
    *,
    np: int,
    env: Mapping[str, str],
    ps: int = 0,
    reports: str | None = None,
    node: Node | None = None,
    start_timeout: float = START_TIMEOUT,
    is_cluster: bool = True,
) -> Command:
    """Builds the command that starts a job.

    Args:
        python: str, the Python that runs this module.
        program: sequence of str, what each rank runs.
        np: int, the number of ranks.
        env: mapping of variable name to value, added to the ranks' environment.
        ps: int, how many of the ranks are parameter servers; the others are then a chief and workers.
        reports: str or `None`, the directory in which it reports which rank failed first.
        node: `Node` or `None`, this machine's place among several; `np` ranks are started on it.
        start_timeout: float, seconds in which all nodes must come.
        is_cluster: bool, whether the ranks know each other by `TF_CONFIG`; one process alone need not be.

    Returns:
        A `Command`.

    Raises:
        LaunchError: if the number of ranks is not positive, or leaves no worker beside a chief and the ps.
    """
    check_slots(np, ())
    if ps and np < ps + 2:
        raise LaunchError(
            f"Too few ranks for parameter servers. Received: -np {np} --ps {ps}. Expected a chief, a worker and {ps} "
            f"ps: at least -np {ps + 2}. Fix: start more ranks."
        )
    roles: tuple[str, ...] = ("--ps", str(ps)) if ps else ()
    roles += ("--reports", reports) if reports else ()
    roles += () if is_cluster else ("--no-cluster",)
    if node is not None:
        roles += ("--node", json.dumps(dataclasses.asdict(node)), "--start-timeout", str(start_timeout))
    return Command((*module_command(python, __name__), "-np", str(np), *roles, *program), env)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs N copies of a program until all have exited.

    Args:
        argv: sequence of str, the arguments; by default those of the process.

    Returns:
        The exit code of the first rank that failed (128 plus the signal's number if killed by one), or 0.
    """
    parser = argparse.ArgumentParser(prog="kdist.launchers.local_cluster", allow_abbrev=False)
    parser.add_argument("-np", type=int, required=True)
    parser.add_argument("--ps", type=int, default=0)
    parser.add_argument("--reports")
    parser.add_argument("--no-cluster", action="store_true")
    parser.add_argument("--node", type=json.loads)
    parser.add_argument("--start-timeout", type=float, default=START_TIMEOUT)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    logging.basicConfig(format="[kdist] %(message)s")
    ending = stop_signals()
    for number in ending:
        signal.signal(number, _stop)
    if options.node is None:
        return _run(options, configurations(options.np, options.ps), 0)
    codes: list[int] = []
    try:
        with joined(Node(**options.node), options.start_timeout) as nodes:
            signal.signal(_PEER_FAILED, _stop)

            def end(code: int, text: str) -> None:
                _LOG.error("the job ends: %s", text)
                codes.append(code)
                os.kill(os.getpid(), _PEER_FAILED)

            nodes.watch(end)
            code = _run(options, worker_configurations(nodes.addresses), nodes.first)
            code = codes[0] if codes else code
            for number in (*ending, _PEER_FAILED):  # node 0 may wait for the others
                signal.signal(number, _stop)
            try:
                nodes.end(code)
            except _Stopped as stopped:
                nodes.end(128 + stopped.number)
                return codes[0] if codes else 128 + stopped.number
            return code
    except LaunchError as error:
        _LOG.error("%s", error)
        return 1
    except _Stopped as stopped:
        return codes[0] if codes else 128 + stopped.number


def _run(options: argparse.Namespace, configs: Sequence[str], first: int) -> int:
    """Runs the ranks of this machine, from `first` on, until all have exited, and returns the exit code."""
    ranks: _Ranks = {}
    env = dict(os.environ)
    if options.node is not None:  # srun may have started each node: its tasks are no ranks
        env = {name: value for name, value in env.items() if not name.startswith(_OF_A_TASK)}

    def start(rank: int) -> None:
        process = subprocess.Popen(
            options.program,
            env=env if options.no_cluster else {**env, "TF_CONFIG": configs[rank]},
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        ranks[process.pid] = rank, process

    # Workers of parameter servers: another worker repeats the step, and a restarted worker joins.
    replaceable = range(1, options.np - options.ps) if options.ps else range(0)
    try:
        for rank in range(first, first + options.np):
            start(rank)
        return _wait(ranks, len(configs), start, dict.fromkeys(replaceable, _MAX_RESTARTS), options.reports)
    except OSError as error:
        _LOG.error("a rank cannot be started: %s", error)
        return 1
    except _Stopped as stopped:
        return 128 + stopped.number
    finally:
        _terminate(ranks)


def configurations(np: int, ps: int = 0) -> list[str]:
    """Returns each rank's `TF_CONFIG`: tasks on the loopback interface, at free ports.

    Args:
        np: int, the number of ranks.
        ps: int, how many of the last ones are parameter servers; the first is then the chief. With 0, all are
            workers.

    Returns:
        A list of str, in rank order.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(np)]
    if not ps:
        return worker_configurations(addresses)
    return _configurations([("chief", addresses[:1]), ("worker", addresses[1 : np - ps]), ("ps", addresses[np - ps :])])


def worker_configurations(addresses: Sequence[str]) -> list[str]:
    """Returns the `TF_CONFIG` of the worker at each of some addresses."""
    return _configurations([("worker", addresses)])


def _configurations(tasks: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    own = [{"type": job, "index": index} for job, each in tasks for index in range(len(each))]
    return [json.dumps({"cluster": dict(tasks), "task": task}) for task in own]


class _Stopped(BaseException):
    """A signal. What comes while a line is logged would be lost as an `Exception`: `logging` prints and drops these."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _wait(ranks: _Ranks, np: int, start: Callable[[int], None], restarts: dict[int, int], reports: str | None) -> int:
    """Waits until all ranks have exited or one has failed; removes those that exited from `ranks`.

    A rank that was killed by a signal is restarted up to `restarts` times. Where some may be, the job has succeeded
    with rank 0, the chief: the others have some seconds to end, and one that came again too late for it may fail.
    """
    ends_by: float | None = None
    restarted: set[int] = set()
    while ranks:
        pid, status = _next_exit(ends_by)
        if not pid:
            return 0
        if pid not in ranks:
            continue
        rank, process = ranks.pop(pid)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        if rank == 0 and code == 0 and restarts:
            ends_by = time.monotonic() + _GRACE_AFTER_CHIEF
        if code == 0 or (ends_by is not None and (code < 0 or rank in restarted)):
            continue
        # It may have reported nothing: killed by a signal, after `os._exit`, or before kdist was used.
        kind, text = (Kind.SIGNAL, killed_by(-code)) if code < 0 else (Kind.EXIT, f"exited with code {code}")
        if code < 0 and restarts.get(rank):
            restarts[rank] -= 1
            restarted.add(rank)
            _LOG.warning("rank %d of %d %s, and is restarted", rank, np, text)
            start(rank)
            continue
        if reports is None:
            _LOG.error("the job ends: rank %d of %d %s", rank, np, text)
        else:  # `kdist run` sums it up
            append_failure(reports, Failure(kind, text, rank, platform.node(), from_launcher=True))
        return 128 - code if code < 0 else code
    return 0


def _next_exit(limit: float | None) -> tuple[int, int]:
    """Waits for a process that ends; returns its id and status, or zeros where none has ended by a time."""
    if limit is None:
        return os.wait()
    while time.monotonic() < limit:
        if (found := os.waitpid(-1, os.WNOHANG))[0]:
            return found
        time.sleep(0.05)
    return 0, 0


def _terminate(ranks: _Ranks) -> None:
    """Ends the remaining ranks: SIGTERM first, SIGKILL after a grace period."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, _PEER_FAILED):
        signal.signal(number, signal.SIG_IGN)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while ranks:
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(-1, os.WNOHANG)
            ranks.pop(pid, None)
            if pid:
                continue
        if time.monotonic() > deadline:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)
