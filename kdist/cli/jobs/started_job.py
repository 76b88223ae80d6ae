"""One start of a job by `kdist run`: its directory, its launcher, and what is said of its end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence

from kdist.cli.jobs import healed
from kdist.cli.jobs.command import build, hosts_of, launcher_arguments
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.standard_input import input_path
from kdist.cli.jobs.watched import Watched
from kdist.errors import LaunchError
from kdist.launchers import process
from kdist.launchers.command import Command
from kdist.launchers.hosts import reach
from kdist.launchers.hosts.allocation import is_elsewhere
from kdist.launchers.job_directory import job_directory
from kdist.launchers.nodes import Node
from kdist.launchers.process import Job
from kdist.launchers.standby import Standby
from kdist.reports import scope_marks
from kdist.reports.first_failure import FailureMonitor
from kdist.reports.job_failure import JobFailure
from kdist.reports.launcher_boxes import filters
from kdist.restarts import request
from kdist.restarts.event_lines import Muted
from kdist.restarts.events import Failure, Kind, append_failure, read_events
from kdist.restarts.launcher_words import killed_by


@dataclasses.dataclass(frozen=True)
class JobToStart:
    """What `kdist run` starts, once or again.

    Attributes:
        options: the parsed arguments.
        node: `Node` or `None`, this machine's place among several.
        program: function of the other arguments of `worker.program`.
        script: str, the path of the script or module; empty if it is unknown.
        name: str, what distinguishes it, started once or again, from other jobs.
        is_crowded: bool, whether the user knows that there are far more ranks than cores.
    """

    options: argparse.Namespace
    node: Node | None
    program: Callable[..., Sequence[str]]
    script: str
    name: str
    is_crowded: bool = False

    @property
    def has_hosts(self) -> bool:
        """Whether the user has named hosts, on which its launcher starts ranks."""
        return self.node is None and bool(self.options.hosts or self.options.hostfile)

    @property
    def is_on_several_hosts(self) -> bool:
        """Whether ranks may be on another host than this one."""
        return self.has_hosts or self.node is not None or is_elsewhere(os.environ)


@contextlib.contextmanager
def started(
    what: JobToStart, output: str | None, watched: Watched | None = None, *, standby: bool = False
) -> Iterator[StartedJob]:
    """Starts a job, yields it, and leaves no process and no directory of it behind.

    Args:
        what: `JobToStart`.
        output: str or `None`, the directory of the ranks' output.
        watched: `Watched` or `None`, what a supervisor learns of the job.
        standby: bool, whether its ranks import Keras and wait until `follow` is called.
    """
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(job_directory())
        stack.callback(request.remove, running)
        if what.is_crowded:
            scope_marks.mark_crowd(running)
        begin, address, waiting = contextlib.ExitStack(), "", None
        if standby:
            waiting = stack.enter_context(contextlib.closing(Standby(everywhere=what.is_on_several_hosts)))
            begin.callback(waiting.begin)
            address = waiting.address
        placement = None if watched is None else watched.placement
        is_resized = placement is not None or what.options.heal is not None
        stdin = input_path(is_on_several_hosts=what.is_on_several_hosts)
        program = what.program(
            output=output,
            running=running,
            supervised=what.name if watched is not None else "",
            resizes=is_resized,
            standby=address,
            stdin=stdin,
        )
        command = build(what.options, program, running, what.node, placement)
        hosts = hosts_of(what.options) if placement is None else placement.hosts
        agent = reach.agent(launcher_arguments(what.options), os.environ)
        notice = _Notice(running, agent, hosts[0].name if hosts else "", is_elsewhere=what.is_on_several_hosts)
        stack.callback(notice.close)
        if output is not None and not standby:
            make_directory(output)
        monitor = stack.enter_context(contextlib.closing(FailureMonitor(running)))
        failure = JobFailure(what.script, "" if what.is_on_several_hosts else platform.node())
        shown, stdout = filters(failure, boxes=command.prints_boxes, labels=command.prints_labels)
        stderr = shown if watched is None else watched.filtered(shown)
        if standby and stderr is not None:  # the terminal shows the job that runs now
            stderr = muted = Muted(stderr)
            begin.callback(muted.unmute)
        job = stack.enter_context(process.started(command, stderr, stdout, reads_input=not standby and stdin is None))
        monitor.watch_launcher(job.pid)
        yield StartedJob(
            command=command,
            job=job,
            running=running,
            monitor=monitor,
            failure=failure,
            output=output,
            watched=watched,
            begin=begin.close,
            standby=waiting,
            notice=notice,
            has_hosts=what.has_hosts,
            healed=None if what.options.heal is None else healed.Watch(running),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedJob:
    """A job whose launcher has been started; `started` makes one.

    Attributes:
        command: `Command`, what was started.
        job: `Job`, its processes.
        running: str, the job's directory.
        monitor: `FailureMonitor`, of its ranks on this host.
        failure: `JobFailure`, which knows what ranks and the launcher say.
        output: str or `None`, the directory of the ranks' output.
        watched: `Watched` or `None`, what a supervisor learns of the job.
        begin: function that lets its ranks begin, if they wait.
        standby: `Standby` or `None`, where they wait.
        notice: `_Notice`, which is passed on to its ranks.
        has_hosts: bool, whether the user has named hosts: files that ranks leave say then that one was lost.
        healed: `healed.Watch` or `None`, where the others go on when a rank is killed.
    """

    command: Command
    job: Job
    running: str
    monitor: FailureMonitor
    failure: JobFailure
    output: str | None
    watched: Watched | None
    begin: Callable[[], object]
    standby: Standby | None
    notice: _Notice
    has_hosts: bool
    healed: healed.Watch | None = None

    @property
    def is_running(self) -> bool:
        """Whether its launcher is, and none of its ranks that were ready to begin has gone."""
        return self.job.is_running and (self.standby is None or not self.standby.has_lost)

    def follow(
        self, received: Sequence[int], notices: Sequence[int], meanwhile: Callable[[str], object] | None = None
    ) -> int:
        """Lets the ranks begin if they wait, and returns the job's exit code when no process of it is left.

        Args:
            received: what `received_signals` yields.
            notices: what `received_notices` yields; at one, all ranks are asked to save and leave.
            meanwhile: function of the job's directory that is called every half second, or `None`.
        """
        slow_start = scope_marks.SlowStart()
        self.begin()

        def must_end() -> bool:
            if notices:
                self.notice.pass_on()
            if meanwhile is not None:
                meanwhile(self.running)
            marks = scope_marks.read(self.running)
            if remark := slow_start.remark(marks):
                tell(remark)
            return self._has_problem(marks) or (self.healed is not None and self.healed.has_problem())

        code = self.job.follow(received, self.monitor.mute, must_end)
        self.notice.close()
        self.monitor.close()
        if self.healed is not None and not received:
            code = self.healed.code(code)
        if self.watched is not None:
            self.watched.read(self.running)
        if received:
            tell(f"{signal.Signals(received[0]).name}: the job has ended", after_output=True)
        code = code if self.monitor.code is None else self.monitor.code
        return self._reported(code, is_explained=bool(received or self.watched))

    def _has_problem(self, marks: scope_marks.Marks) -> bool:
        """Returns whether the job cannot go on, and says why."""
        problem = marks.problem()
        if problem:
            self.monitor.mute()
            self.failure.is_known = True
            tell(problem, after_output=True)
            append_failure(self.running, Failure(Kind.DISAGREEMENT, problem))
        return bool(problem)

    def _reported(self, code: int, *, is_explained: bool) -> int:
        """Says how the job has ended, and returns its exit code, which is not 0 if a rank or a host was lost."""
        names = _names_in(self.running)
        lost = sorted((name for name in names if name.isdigit()), key=int)
        lost = lost if self.has_hosts else []
        # Open MPI exits with 0 after it lost a host and killed the ranks of the others. There may be no rank here.
        if code == 0 and (lost or self.failure.has_lost_host):
            what = f"rank {', '.join(lost)} failed" if lost else "a host was lost"
            tell(f"{what}, but {self.command.argv[0]} reported success", after_output=True)
            code, is_explained = 1, True
        for reported in scope_marks.read_report(self.running).encode().splitlines():
            self.failure.read(reported)
        for failure in read_events(self.running).failures:
            if failure.from_launcher:
                self.failure.take(failure)
        gone = () if self.healed is None else self.healed.lost
        summary = self.failure.summary(code, self.output, self.running, gone) if code else ""
        if self.output is not None and not summary:
            tell(f"the output of each rank is in {self.output} (rank0.out, rank0.err, ...)")
        for place, line in enumerate(summary.splitlines()):
            tell(line, after_output=place == 0)
        if code == 0 and (remark := scope_marks.read(self.running).remark()):
            tell(remark)
        if code and not (is_explained or self.failure.is_known):
            what, where = "and no rank of this host has reported a failure", "the lines above, which are the launcher's"
            if self.job.signal and code == 128 + self.job.signal:  # else `kdist run` has ended it
                launcher = os.path.basename(self.command.argv[0])
                what = f"for {launcher} {killed_by(self.job.signal)}, and all ranks with it"
                where = "the system log of this host: the kernel kills processes that run out of memory"
            tell(f"the job's exit code is {code}, {what}. Fix: read {where}", after_output=True)
        return code


class _Notice:
    """A notice to `kdist run`, by which all ranks are asked to save and leave, once, through the host of rank 0.

    Args:
        running: str, the job's directory.
        agent: sequence of str, by which hosts are reached.
        chief: str, the host of rank 0; empty if no hosts are named, and it is taken for this one.
        is_elsewhere: bool, whether rank 0 may be on another host than this one.
    """

    def __init__(self, running: str, agent: Sequence[str], chief: str, *, is_elsewhere: bool) -> None:
        self._agent, self._chief = agent, chief or platform.node()
        self._command = ("touch", request.path_of(running, request.NOTICE))
        self._is_known = bool(chief) or not is_elsewhere
        self._asked: reach.RemoteCommand | None = None
        self._is_passed_on = False

    def pass_on(self) -> None:
        """Asks the ranks, and says it if their host does not answer; does not wait."""
        if self._asked is None:
            self._asked = reach.RemoteCommand(self._agent, [self._chief], self._command)
            who = "all ranks are" if self._is_known else "rank 0, if it is on this host, and all ranks through it, are"
            tell(f"SIGUSR1: {who} asked to save and leave (kdist.callbacks.Preemption)")
        elif not self._is_passed_on and self._asked.is_over():
            self._is_passed_on = True
            if not self._asked.succeeded:
                tell(f"{self._chief} does not answer, where rank 0 is: the ranks do not know that they are to leave")

    def close(self) -> None:
        """Asks no more."""
        if self._asked is not None:
            self._asked.close()


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # something may have cleaned /tmp, or it is on a disk of the network
        return []


def make_directory(path: str) -> None:
    """Makes the directory of a job's output.

    Args:
        path: str.

    Raises:
        LaunchError: if it cannot be made or written to.
    """
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except OSError as err:
        raise LaunchError(
            f"The output directory cannot be created. Received: --output {path}: {err}. Expected a writable directory. "
            "Fix: choose another one."
        ) from err
