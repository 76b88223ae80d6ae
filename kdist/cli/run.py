"""`kdist run`: starts a script on several processes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist._arguments import check_environment
from kdist.cli import nodes, script, supervised
from kdist.cli.message import tell
from kdist.cli.parser import closest
from kdist.cluster import detect
from kdist.errors import LaunchError
from kdist.launchers import horovodrun, local_cluster, mpirun, process, worker
from kdist.launchers.command import Command, variables_to_forward
from kdist.launchers.hosts import Host, all_local, check_slots, is_scheduled, parse_hostfile, parse_hosts
from kdist.launchers.nodes import Node
from kdist.reports import scope_marks
from kdist.reports.first_failure import FailureMonitor
from kdist.reports.launcher_boxes import BoxFilter
from kdist.restarts.report import Failure, Kind, append_failure
from kdist.strategies.selection import PARAMETER_SERVER, PASSED_THROUGH, WORDS

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(verbs: _SubParsersAction[Any]) -> None:
    """Adds the verb to the command line.

    Args:
        verbs: what `ArgumentParser.add_subparsers` returned.
    """
    parser = verbs.add_parser(
        "run",
        help="start a script on several processes",
        description="Start a script on several processes. The output of rank 0 is shown.",
        usage="kdist run -np N [options] [--] [python] SCRIPT [ARGS...]\n"
        "       kdist run -np N [options] -m MODULE [ARGS...]",
        allow_abbrev=False,
    )
    add_launch_arguments(parser)
    parser.add_argument("--output", metavar="DIR", help="write every rank's output to DIR/rank0.out, rank0.err, ...")
    parser.add_argument(
        "--tee", action="store_true", help="show the output of all ranks, each line with its rank and the time"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="start the job again after a lost rank, at most N times without a new checkpoint",
    )
    nodes.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(verb=run)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the number of ranks and their hosts.

    Args:
        parser: the verb's parser.
    """
    parser.add_argument("-np", type=int, metavar="N", help="number of ranks; by default all slots of the hosts")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts, and the ranks that each may run")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one host per line: `host slots=4` or `host:4`")
    parser.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than the slots of -H or --hostfile"
    )
    parser.add_argument(
        "--strategy",
        metavar="WORD",
        help=f"the strategy and its launcher: {', '.join(_words())} (sets KDIST_STRATEGY for the ranks)",
    )
    parser.add_argument(
        "--ps", type=int, metavar="N", help="with --strategy parameter_server: how many ranks hold variables (1)"
    )
    parser.add_argument("--launcher-args", default="", metavar="ARGS", help="additional arguments for the launcher")


def run(options: argparse.Namespace) -> int:
    """Starts a script on several processes.

    Args:
        options: the parsed arguments.

    Returns:
        The script's exit code.

    Raises:
        LaunchError: if the job cannot be started as asked.
    """
    words, is_module = script.parse(options.script, options.module)
    if not words:
        raise LaunchError(
            "No script given. Received: neither a script nor -m MODULE. Expected one. Fix: kdist run -np 2 train.py"
        )
    if not is_module:
        script.check_exists(words[0], "; `kdist run -m` takes a module")
    if options.np is None and "-np" in words[1:]:
        raise LaunchError(
            f"No number of ranks given. Received: -np after {words[0]}, so that the script gets it. Expected -np N "
            "before it. Fix: kdist run -np 2 train.py"
        )
    output = None if options.output is None else os.path.abspath(options.output)
    if options.restarts is not None:
        _check_restarts(options)
    node = nodes.node_of(options, words, os.environ)
    program = functools.partial(worker.program, sys.executable, words, module=is_module, tee=options.tee)
    if options.dry_run:
        print(build(options, program(output=output), node=node))
        return 0
    run_job = functools.partial(_run_job, options, node, program, "" if is_module else words[0])
    if options.restarts is None:
        return run_job(output)
    if output is not None:
        _make_directory(output)
    return supervised.run(run_job, options.restarts, output)


def _run_job(
    options: argparse.Namespace,
    node: Node | None,
    program: Callable[..., Sequence[str]],
    script_path: str,
    output: str | None,
    watched: supervised.Watched | None = None,
) -> int:
    """Runs the job once, and returns its exit code.

    Args:
        options: the parsed arguments.
        node: `Node` or `None`, this machine's place among several.
        program: function of the other arguments of `worker.program`.
        script_path: str, the script; empty for a module.
        output: str or `None`, the directory of the ranks' output.
        watched: `Watched` or `None`, what a supervisor learns of the job.
    """
    with tempfile.TemporaryDirectory(prefix="kdist-") as running:
        reports = None if watched is None else running
        command = build(options, program(output=output, running=running, reports=watched is not None), reports, node)
        if output is not None:
            _make_directory(output)
        monitor = FailureMonitor(running)

        slow_start = scope_marks.SlowStart()
        boxes = BoxFilter(script_path)

        def must_end() -> bool:
            marks = scope_marks.read(running)
            if remark := slow_start.remark(marks):
                tell(remark)
            if problem := marks.problem():
                monitor.mute()
                boxes.know()
                tell(problem)
                append_failure(running, Failure(Kind.DISAGREEMENT, problem))
            return bool(problem)

        shown = boxes if command.prints_boxes else None
        code = process.run(
            command,
            on_signal=monitor.mute,
            must_end=must_end,
            stderr=shown if watched is None else watched.filtered(shown),
            signals=None if watched is None else watched.signals,
        )
        monitor.close()
        code = code if monitor.code is None else monitor.code
        if watched is not None:
            watched.read(running)
        if not command.prints_boxes:
            boxes.feed(scope_marks.read_report(running).encode())
        summary = boxes.summary(code, output) if code else ""
        if output is not None and not summary:
            tell(f"the output of each rank is in {output} (rank0.out, rank0.err, ...)")
        for line in summary.splitlines():
            tell(line)
        if code == 0 and (remark := scope_marks.read(running).remark()):
            tell(remark)
        lost = sorted((name for name in os.listdir(running) if name.isdigit()), key=int)
    if code == 0 and lost and (options.hosts or options.hostfile):
        # Open MPI exits with 0 after it lost a host and killed the ranks of the others.
        tell(f"rank {', '.join(lost)} failed, but {command.argv[0]} reported success")
        return 1
    return code


def build(
    options: argparse.Namespace, program: Sequence[str], reports: str | None = None, node: Node | None = None
) -> Command:
    """Builds the command that starts a job, from the arguments of `add_launch_arguments`.

    Args:
        options: the parsed arguments.
        program: sequence of str, what each rank runs.
        reports: str or `None`, the directory in which a launcher of kdist reports which rank failed first.
        node: `Node` or `None`, this machine's place among several.

    Returns:
        A `Command`.

    Raises:
        LaunchError: if the job cannot be started as asked.
    """
    if node is None or not nodes.is_one_of_nodes(options, os.environ):
        _check_not_a_rank(os.environ)
    check_environment(os.environ)
    if node is not None:
        env = {} if options.strategy is None else {"KDIST_STRATEGY": options.strategy}
        python, timeout = sys.executable, options.start_timeout
        return local_cluster.build(
            python, program, np=node.np, env=env, reports=reports, node=node, start_timeout=timeout
        )
    hosts = _hosts(options)
    np = sum(host.slots for host in hosts) if options.np is None and hosts else options.np
    if np is None:
        raise LaunchError(
            "No number of ranks given. Received: neither -np nor hosts. Expected -np N. Fix: kdist run -np 2 train.py"
        )
    check_slots(np, hosts, oversubscribe=options.oversubscribe)
    strategy, variable = options.strategy, os.environ.get("KDIST_STRATEGY")
    if strategy is not None and variable not in (None, strategy):
        raise LaunchError(
            f"Two different strategies are given. Received: --strategy {strategy} and KDIST_STRATEGY={variable}. "
            "Expected one. Fix: omit --strategy, or unset KDIST_STRATEGY."
        )
    env = {} if strategy is None else {"KDIST_STRATEGY": _check_strategy(strategy)}
    job = _Job(
        program=program,
        np=np,
        hosts=hosts,
        local=all_local(hosts, socket.gethostname()) and not is_scheduled(os.environ),
        extra=_split(options.launcher_args),
        env=env,
        ps=options.ps,
        oversubscribe=options.oversubscribe,
        reports=reports,
    )
    word = strategy or os.environ.get("KDIST_STRATEGY", "auto")
    if job.ps is not None and (word != PARAMETER_SERVER or job.ps < 1):
        raise LaunchError(
            f"--ps needs parameter servers. Received: --ps {job.ps} with the strategy {word!r}. Expected at least 1, "
            "with --strategy parameter_server. Fix: change one of them."
        )
    return _BUILDERS.get(word, _by_mpirun)(job)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What to start, with any launcher."""

    program: Sequence[str]
    np: int
    hosts: Sequence[Host]
    local: bool  # whether all ranks are on this machine
    extra: Sequence[str]  # additional arguments for the launcher
    env: Mapping[str, str]  # added to the ranks' environment
    ps: int | None  # the number of parameter servers, if given
    oversubscribe: bool  # whether there may be more ranks than slots
    reports: str | None = None  # where a launcher of kdist reports which rank failed first


def _by_mpirun(job: _Job) -> Command:
    return mpirun.build(
        mpirun.find(sys.executable, os.environ.get("PATH")),
        job.program,
        np=job.np,
        hosts=job.hosts,
        extra=job.extra,
        env=job.env,
        forward=() if job.local else variables_to_forward({**os.environ, **job.env}),
        root=os.geteuid() == 0,
        # Open MPI refuses more ranks than cores, and does not count hardware threads.
        oversubscribe=job.local or job.oversubscribe,
    )


def _by_local_cluster(job: _Job) -> Command:
    # On several hosts mpirun starts the ranks, which exchange their addresses over MPI.
    if not job.local or job.extra:
        return _by_mpirun(job)
    return local_cluster.build(sys.executable, job.program, np=job.np, env=job.env, reports=job.reports)


def _by_roles(job: _Job) -> Command:
    if job.local and not job.extra:
        return local_cluster.build(sys.executable, job.program, np=job.np, env=job.env, ps=job.ps or 1)
    if job.ps is not None:
        raise LaunchError(
            f"--ps is not supported on several hosts, where mpirun starts the ranks. Received: --ps {job.ps}. Expected "
            f"the number in the script. Fix: kdist.scope(kdist.ParameterServer(num_ps={job.ps})), and omit --ps."
        )
    return _by_mpirun(job)


def _by_horovodrun(job: _Job) -> Command:
    search_path = os.environ.get("PATH", "")
    try:
        mpi = mpirun.find(sys.executable, search_path)
    except LaunchError:
        mpi = None
    return horovodrun.build(
        horovodrun.find(sys.executable, search_path),
        job.program,
        np=job.np,
        hosts=job.hosts,
        extra=job.extra,
        env=job.env,
        mpirun=mpi,
        search_path=search_path,
    )


# The launchers of the strategies for which mpirun is not the first choice.
_BUILDERS: Mapping[str, Callable[[_Job], Command]] = {
    "collective": _by_local_cluster,
    "horovod": _by_horovodrun,
    PARAMETER_SERVER: _by_roles,
}


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        with open(options.hostfile, encoding="utf-8") as file:
            return parse_hostfile(file.read(), options.hostfile)
    except (OSError, UnicodeDecodeError) as err:
        raise LaunchError(
            f"The hostfile cannot be read. Received: --hostfile {options.hostfile}: {err}. Expected a text file with "
            "one host per line. Fix: check the path, or pass the hosts to -H."
        ) from err


def _check_restarts(options: argparse.Namespace) -> None:
    if options.restarts < 1:
        raise LaunchError(
            f"--restarts is not positive. Received: --restarts {options.restarts}. Expected at least 1. Fix: omit it, "
            "and the job is started once."
        )
    if (options.strategy or os.environ.get("KDIST_STRATEGY")) == PARAMETER_SERVER:
        raise LaunchError(
            f"--restarts is not for parameter servers. Received: --restarts {options.restarts} with the strategy "
            f"{PARAMETER_SERVER!r}, whose lost workers are started again by themselves. Expected one of collectives. "
            "Fix: omit --restarts, and start the command again after a loss of the chief or of a parameter server."
        )


def _make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as err:
        raise LaunchError(
            f"The output directory cannot be created. Received: --output {path}: {err}. Expected a writable directory. "
            "Fix: choose another one."
        ) from err


def _check_strategy(strategy: str) -> str:
    if strategy in PASSED_THROUGH:
        raise LaunchError(
            f"This strategy runs in one process. Received: --strategy {strategy}. Expected one of several processes. "
            f"Fix: KDIST_STRATEGY={strategy} python SCRIPT."
        )
    if strategy in WORDS:
        return strategy
    meant = closest(strategy, _words())
    raise LaunchError(
        f"Unknown strategy. Received: --strategy {strategy}. Expected one of {', '.join(_words())}. "
        f"Fix: {f'did you mean {meant}?' if meant else 'choose one.'}"
    )


def _words() -> list[str]:
    return [word for word in WORDS if word not in PASSED_THROUGH]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as err:
        raise LaunchError(
            f"--launcher-args cannot be parsed. Received: {text!r}: {err}. Expected arguments as in a shell. "
            "Fix: close the quotation."
        ) from err


def _check_not_a_rank(env: Any) -> None:
    """Raises if this process is a rank: each rank would start a whole job."""
    info = detect(env)
    if info.size > 1:
        raise LaunchError(
            f"kdist run was started inside of a job. Received: a process that is rank {info.rank} of {info.size} "
            f"({info.launcher}: {info.reason}). Expected a single process. Fix: start the script itself with "
            f"{info.launcher}, or unset its variables."
        )
