"""`kdist run`: starts a script on several processes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

from kdist.cli import script
from kdist.cli.jobs import elastic, healed, nodes, supervised
from kdist.cli.jobs.command import add_launch_arguments, build, take_allocation
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.parser import count
from kdist.cli.jobs.started_job import JobToStart, make_directory, started
from kdist.cluster.cores import own_cores, remark_on_start
from kdist.errors import LaunchError
from kdist.launchers import worker
from kdist.launchers.process import received_notices, received_signals
from kdist.strategies.selection import PARAMETER_SERVER

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subcommands: _SubParsersAction[Any]) -> None:
    """Adds the subcommand to the command line.

    Args:
        subcommands: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "run",
        help="start a script on several processes",
        description="Start a script on several processes. The output of rank 0 is shown.",
        usage="kdist run -np N [options] [--] [python] SCRIPT [ARGS...]\n"
        "       kdist run -np N [options] -m MODULE [ARGS...]",
        allow_abbrev=False,
    )
    add_launch_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", help="write every rank's output to DIR/rank0.out, rank0.err, ...")
    output.add_argument(
        "--tee", action="store_true", help="show the output of all ranks, each line with its rank and the time"
    )
    restarts = parser.add_argument_group("restarts")
    restarts.add_argument(
        "--restarts",
        type=count,
        metavar="N",
        help="start the job again after a lost rank, at most N times without a new checkpoint",
    )
    restarts.add_argument(
        "--standby",
        action="store_true",
        help="with --restarts: the next start waits beside the job, with Keras imported, and so begins sooner",
    )
    healed.add_arguments(restarts)
    elastic.add_arguments(restarts)
    nodes.add_arguments(parser.add_argument_group("several nodes without MPI or ssh"))
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    script.add_arguments(parser, "run")
    parser.set_defaults(subcommand=run)


def run(options: argparse.Namespace) -> int:
    """Starts a script on several processes.

    Args:
        options: the parsed arguments.

    Returns:
        The script's exit code.

    Raises:
        LaunchError: if the job cannot be started as asked.
    """
    words, is_module = script.required(options, "run")
    if (options.np, options.hosts, options.hostfile) == (None, None, None) and "-np" in words[1:]:
        raise LaunchError(
            f"No number of ranks given. Received: -np after {words[0]}, so that the script gets it. Expected -np N "
            "before it. Fix: kdist run -np 2 train.py"
        )
    take_allocation(options, os.environ)
    output = None if options.output is None else os.path.abspath(options.output)
    if options.restarts is not None:
        _check_restarts(options)
    elif options.standby:
        raise LaunchError(
            "--standby has no effect without --restarts. Received: --standby alone. Expected both. Fix: --restarts 3."
        )
    heals = healed.least_of(options, os.environ)
    node = nodes.node_of(options, words, os.environ)
    sizes = elastic.elastic_of(options, os.environ) if heals is None else None
    program = functools.partial(worker.program, sys.executable, words, module=is_module, tee=options.tee, heals=heals)
    if options.dry_run:
        print(build(options, program(output=output), node=node))
        return 0
    job = JobToStart(options, node, program, script.file_of(words[0]) if is_module else words[0], secrets.token_hex(8))
    if not job.is_on_several_hosts and (remark := remark_on_start(options.np or 1, own_cores())):
        tell(remark)
        job = dataclasses.replace(job, is_crowded=True)
    if output is not None:
        make_directory(output)
    if options.restarts is not None:
        return supervised.run(job, options.restarts, output, sizes, standby=options.standby)
    with received_signals() as signals, received_notices() as notices, started(job, output) as running:
        return running.follow(signals, notices)


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
