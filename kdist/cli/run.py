"""`kdist run`: starts a script on several processes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist.cli import elastic, nodes, script, supervised
from kdist.cli.job import add_launch_arguments, build
from kdist.cli.message import tell
from kdist.cli.parser import count
from kdist.errors import LaunchError
from kdist.launchers import process, worker
from kdist.launchers.job_directory import job_directory
from kdist.launchers.nodes import Node
from kdist.reports import scope_marks
from kdist.reports.first_failure import FailureMonitor
from kdist.reports.launcher_boxes import BoxFilter
from kdist.restarts.report import Failure, Kind, append_failure
from kdist.strategies.selection import PARAMETER_SERVER

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
        type=count,
        metavar="N",
        help="start the job again after a lost rank, at most N times without a new checkpoint",
    )
    elastic.add_arguments(parser)
    nodes.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(verb=run)


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
    if (options.np, options.hosts, options.hostfile) == (None, None, None) and "-np" in words[1:]:
        raise LaunchError(
            f"No number of ranks given. Received: -np after {words[0]}, so that the script gets it. Expected -np N "
            "before it. Fix: kdist run -np 2 train.py"
        )
    output = None if options.output is None else os.path.abspath(options.output)
    if options.restarts is not None:
        _check_restarts(options)
    node = nodes.node_of(options, words, os.environ)
    sizes = elastic.elastic_of(options, os.environ)
    program = functools.partial(worker.program, sys.executable, words, module=is_module, tee=options.tee)
    if options.dry_run:
        print(build(options, program(output=output), node=node))
        return 0
    run_job = functools.partial(_run_job, options, node, program, "" if is_module else words[0])
    if options.restarts is None:
        return run_job(output)
    if output is not None:
        _make_directory(output)
    return supervised.run(run_job, options.restarts, output, sizes)


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
    with job_directory() as running:
        reports, placement = (None, None) if watched is None else (running, watched.placement)
        words = program(output=output, running=running, reports=watched is not None, resizes=placement is not None)
        command = build(options, words, reports, node, placement)
        if output is not None:
            _make_directory(output)
        monitor = FailureMonitor(running)

        slow_start = scope_marks.SlowStart()
        boxes = BoxFilter(script_path)

        def must_end() -> bool:
            if watched is not None:
                watched.look(running)
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
