"""`kdist run --min-np N --max-np M`: each attempt takes the hosts that answer, and leaves for a larger one."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kdist.cli.jobs.command import hosts_of, launcher_arguments, num_ranks
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.parser import count, seconds
from kdist.errors import LaunchError
from kdist.launchers.hosts import reach
from kdist.launchers.hosts.capacity import Placement, place
from kdist.launchers.hosts.host import Host
from kdist.restarts import request
from kdist.restarts.attempt import Attempt, End
from kdist.restarts.bad_hosts import left_out
from kdist.restarts.events import Events, Failure, Kind
from kdist.restarts.rules import ASKED_TO_END, unproven_hosts
from kdist.strategies.selection import PARAMETER_SERVER

_WAIT = 600.0  # seconds
_LOOK = 30.0
_LOOKS_OUT = 2  # the looks in which a bad host is left out for the first time
_PAUSE = 5.0  # seconds between two questions to hosts that do not answer


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the arguments to a group of a subcommand's parser."""
    group.add_argument(
        "--min-np", type=count, metavar="N", help="with --restarts: the least number of ranks to go on with (-np)"
    )
    group.add_argument(
        "--max-np", type=count, metavar="M", help="with --restarts: the number to grow to when hosts are back (-np)"
    )
    group.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help=f"with --min-np: how long to wait for hosts if too few answer ({_WAIT:g})",
    )
    group.add_argument(
        "--look",
        type=seconds,
        metavar="SECONDS",
        help=f"with --max-np: how often to look whether more hosts answer ({_LOOK:g})",
    )


@dataclasses.dataclass(frozen=True)
class Elastic:
    """The sizes that a job may have.

    Attributes:
        min_np: int, the least number of ranks.
        max_np: int, the greatest.
        wait: float, seconds to wait for the least number.
        look_every: float, seconds between two looks for more hosts.
        agent: tuple of str, by which hosts are asked.
        read_hosts: function that returns the hosts of the job, as they are named now.
    """

    min_np: int
    max_np: int
    wait: float
    look_every: float
    agent: tuple[str, ...]
    read_hosts: Callable[[], Sequence[Host]]

    def next_placement(
        self, attempts: Sequence[Attempt], is_stopped: Callable[[], bool], answering: Collection[str] | None = None
    ) -> Placement | str:
        """Returns where the next attempt runs, once enough hosts answer, or why it does not.

        Args:
            attempts: sequence of `Attempt`, all so far.
            is_stopped: function that returns whether a signal has asked to end.
            answering: collection of str or `None`, the hosts that answer now, if that is known.
        """
        deadline, has_told = time.monotonic() + self.wait, False
        while True:
            hosts = self.read_hosts()
            answering = self.answering(is_stopped) if answering is None else answering
            if is_stopped():
                return ASKED_TO_END
            bad = left_out(attempts, time.time(), _LOOKS_OUT * self.look_every)
            found = place(hosts, answering, bad, self.min_np, self.max_np)
            missing = _missing(hosts, answering, [] if found is None else set(bad) - set(found.host_of_rank))
            if found is not None:
                if found.np < self.max_np:
                    tell(f"{found.np} of at most {self.max_np} ranks, on {found}: {missing}")
                return found
            few = f"too few hosts for --min-np {self.min_np}: {missing}"
            if time.monotonic() >= deadline:
                return f"{few}, for {self.wait:g} s; asked by `{shlex.join(self.agent)} HOST true`"
            if not has_told:
                has_told = True
                tell(f"{few}; they have {self.wait:g} s to come (--wait)")
            _sleep(min(_PAUSE, self.wait), is_stopped)
            answering = None

    def answering(self, is_stopped: Callable[[], bool]) -> Collection[str]:
        """Returns the names of the hosts that answer.

        Args:
            is_stopped: function that returns whether a signal has asked to end.
        """
        command = reach.RemoteCommand(self.agent, [host.name for host in self.read_hosts()])
        while not command.is_over() and not is_stopped():
            time.sleep(0.05)
        command.close()
        return command.succeeded


class Growth:
    """Looks now and then whether a running attempt could be larger, and asks its ranks to leave for that.

    Args:
        elastic: `Elastic`, the sizes that the job may have.
        placement: `Placement`, of the attempt that runs.
        attempts: sequence of `Attempt`, those before.

    Attributes:
        wanted: `Placement` or `None`, the larger one, once the ranks are asked to leave for it.
    """

    def __init__(self, elastic: Elastic, placement: Placement, attempts: Sequence[Attempt]) -> None:
        self.wanted: Placement | None = None
        self._elastic = elastic
        self._placement = placement
        self._attempts = attempts
        self._due = time.monotonic() + elastic.look_every
        self._look_command: reach.RemoteCommand | None = None
        self._request: reach.RemoteCommand | None = None
        self._has_warned = False

    def look(self, running: str, read_events: Callable[[], Events]) -> None:
        """Does what is to be done now, without waiting for anything.

        Args:
            running: str, the job's directory.
            read_events: function that returns what the attempt's ranks have reported so far.
        """
        if self._request is not None:
            if self._request.is_over() and not self._request.succeeded:  # it is made again
                self._request = self._look_command = None
        elif self._look_command is None:
            if self._placement.np < self._elastic.max_np and time.monotonic() >= self._due:
                others = {host.name for host in self._elastic.read_hosts()} - {*self._placement.host_of_rank}
                self._look_command = reach.RemoteCommand(self._elastic.agent, others)
        elif self._look_command.is_over():
            self._due = time.monotonic() + self._elastic.look_every
            answering, self._look_command = self._look_command.succeeded | {*self._placement.host_of_rank}, None
            elastic = self._elastic
            bad = left_out(self._attempts, time.time(), _LOOKS_OUT * elastic.look_every)
            found = place(elastic.read_hosts(), answering, bad, elastic.min_np, elastic.max_np)
            if found is not None and found.np > self._placement.np:
                self._leave_for(found, running, read_events())

    def close(self, running: str) -> None:
        """Ends what is under way; the attempt has ended.

        Args:
            running: str, the job's directory.
        """
        for each in (self._look_command, self._request):
            if each is not None:
                each.close()
        request.remove(running)

    def _leave_for(self, larger: Placement, running: str, events: Events) -> None:
        new = ", ".join(dict.fromkeys(name for name in larger.host_of_rank if name not in self._placement.host_of_rank))
        how = f"{larger.np} ranks instead of {self._placement.np}: {new or 'a host with more slots'} can take part"
        if events.can_leave:
            tell(f"all ranks are asked to save and leave, for {how}")
            self.wanted = larger
            chief = self._placement.hosts[0].name
            self._request = reach.RemoteCommand(
                self._elastic.agent, [chief], ("touch", request.path_of(running, request.LARGER_JOB))
            )
        elif events.made_step and not self._has_warned:
            self._has_warned = True
            tell(
                f"the job could have {how}, but goes on as it is until an attempt ends: its fit has no callbacks by "
                'which ranks save and leave. Fix: fit(callbacks=[kdist.callbacks.BackupAndRestore("DIRECTORY"), '
                "kdist.callbacks.Preemption()])"
            )


class PlacementPlanner:
    """Plans the placements of a job's attempts, one after the other.

    Args:
        elastic: `Elastic`, the sizes that the job may have.
        is_stopped: function that returns whether a signal has asked to end.

    Attributes:
        growth: `Growth` or `None`, of the last attempt.
    """

    def __init__(self, elastic: Elastic, is_stopped: Callable[[], bool]) -> None:
        self.growth: Growth | None = None
        self._elastic = elastic
        self._is_stopped = is_stopped
        self._answering: Collection[str] | None = None

    def explained(self, attempts: Sequence[Attempt], attempt: Attempt) -> Attempt:
        """Returns an attempt whose cause is a host that does not answer or start, if nothing else tells its cause.

        Args:
            attempts: sequence of `Attempt`, those before.
            attempt: `Attempt`, which has just ended.
        """
        self._answering, failure = None, attempt.failure
        is_known = failure is not None and (failure.kind is not Kind.LOST or failure.host or failure.rank is not None)
        if attempt.end is not End.FAILED or is_known:
            return attempt
        self._answering = self._elastic.answering(self._is_stopped)
        silent = [host for host in dict.fromkeys(attempt.hosts) if host not in self._answering]
        new = [] if attempt.made_step else sorted(unproven_hosts([*attempts, attempt]))
        if self._is_stopped() or not (silent or new):
            return attempt
        what = "does not answer any more" if silent else "came in addition, and the job does not start with it"
        text = f"host {', '.join(silent or new)} {what}"
        return dataclasses.replace(attempt, failure=Failure(Kind.LOST, text, None, (silent or new)[0]))

    def next(self, attempts: Sequence[Attempt]) -> Placement | str:
        """Returns where the next attempt runs, or why it does not; `growth` is that attempt's afterwards.

        Args:
            attempts: sequence of `Attempt`, all so far.
        """
        wanted = None if self.growth is None else self.growth.wanted
        if wanted is not None and attempts[-1].cause == Kind.RESIZE.value:
            placement: Placement | str = wanted  # not asked again: a host that answers and does not start is left out
        else:
            placement = self._elastic.next_placement(attempts, self._is_stopped, self._answering)
        if isinstance(placement, Placement):
            self.growth = Growth(self._elastic, placement, attempts)
        return placement


def elastic_of(options: argparse.Namespace, env: Mapping[str, str]) -> Elastic | None:
    """Returns the sizes that a job may have; `None` for one of a fixed size.

    Args:
        options: the parsed arguments.
        env: mapping, the environment.

    Raises:
        LaunchError: if the arguments contradict each other, or one is out of range.
    """
    if options.min_np is None and options.max_np is None:
        for name in ("wait", "look"):
            if getattr(options, name) is not None:
                raise LaunchError(
                    f"--{name} has no effect. Received: --{name} without --min-np and --max-np. Expected one of them. "
                    f"Fix: --min-np N, or omit --{name}."
                )
        return None
    given = " ".join(
        f"--{name}-np {value}"
        for name, value in (("min", options.min_np), ("max", options.max_np))
        if value is not None
    )
    _check_others(options, given, env)
    hosts = hosts_of(options)
    slots = sum(host.slots for host in hosts)
    np = num_ranks(options, hosts)
    if None not in (options.np, options.min_np, options.max_np):
        raise LaunchError(
            f"-np, --min-np and --max-np contradict each other. Received: -np {options.np} {given}. Expected two of "
            "them: the job has as many ranks as the hosts that answer have slots, within --min-np and --max-np. Fix: "
            "omit -np."
        )
    np = slots if np is None else np
    max_np = np if options.max_np is None else options.max_np
    min_np = np if options.min_np is None else options.min_np
    if not 1 <= min_np <= max_np <= slots:
        raise LaunchError(
            f"--min-np, --max-np and the hosts' slots contradict each other. Received: {given}, so from {min_np} to "
            f"{max_np} ranks on {','.join(map(str, hosts))}, which has {slots} slot(s). Expected 1 <= min <= max <= "
            f"{slots}. Fix: change one of them, or the slots (host:slots)."
        )
    wait = _WAIT if options.wait is None else options.wait
    look = _LOOK if options.look is None else options.look
    if not (0 <= wait < math.inf and 0 < look < math.inf):
        raise LaunchError(
            f"--wait or --look is out of range. Received: --wait {wait:g} --look {look:g}. Expected 0 seconds or more "
            "to wait, and more than 0 between two looks. Fix: change one of them, or omit it."
        )
    return Elastic(
        min_np,
        max_np,
        wait,
        look,
        reach.agent(launcher_arguments(options), env),
        _Hosts(options, hosts).read,
    )


class _Hosts:
    """The hosts of a job: those of the hostfile as it is now."""

    def __init__(self, options: argparse.Namespace, hosts: Sequence[Host]) -> None:
        self._options = options
        self._hosts = hosts
        self._said = ""

    def read(self) -> Sequence[Host]:
        try:
            self._hosts = hosts_of(self._options)
        except LaunchError as error:  # somebody edits it
            if str(error) != self._said:
                self._said = str(error)
                tell(f"the hosts are those of before: {error}")
        return self._hosts


def _check_others(options: argparse.Namespace, given: str, env: Mapping[str, str]) -> None:
    if (options.strategy or env.get("KDIST_STRATEGY")) == PARAMETER_SERVER:
        raise LaunchError(
            f"{given} is not for parameter servers. Received: it with the strategy {PARAMETER_SERVER!r}, whose lost "
            f"workers are started again by themselves. Expected one of collectives. Fix: omit {given}."
        )
    if options.restarts is None:
        raise LaunchError(
            f"{given} needs --restarts: a job changes its size when it is started again. Received: {given} alone. "
            "Expected both. Fix: add --restarts 3."
        )
    if options.hosts is None and options.hostfile is None:
        raise LaunchError(
            f"{given} needs hosts, of which some may be lost. Received: {given} without -H and --hostfile. Expected "
            f"one of these. Fix: add -H alpha:2,beta:2, or omit {given}."
        )


def _missing(hosts: Sequence[Host], answering: Collection[str], bad: Collection[str]) -> str:
    silent = [host.name for host in hosts if host.name not in answering]
    said = [f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    if out := [host.name for host in hosts if host.name in bad and host.name not in silent]:
        said.append(f"{', '.join(out)} {'is' if len(out) == 1 else 'are'} left out for a while")
    return ", ".join(said) or "there are no more hosts"


def _sleep(seconds: float, is_stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_stopped():
        time.sleep(0.1)
