"""`kdist check`: a smoke test under the real launcher."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from kdist.cli import script
from kdist.cli.jobs.command import add_launch_arguments, build, take_allocation
from kdist.errors import LaunchError
from kdist.launchers import process, worker
from kdist.reports.job_failure import JobFailure
from kdist.reports.launcher_boxes import filters
from kdist.strategies.selection import PARAMETER_SERVER

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subcommands: _SubParsersAction[Any]) -> None:
    """Adds the subcommand to the command line.

    Args:
        subcommands: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "check",
        help="test the launcher, the ranks' devices and messages, and a small fit",
        description="Run a smoke test on several processes, under the launcher that kdist run uses.",
        usage="kdist check [-np N] [options] [SCRIPT [ARGS...]]",
        allow_abbrev=False,
    )
    add_launch_arguments(parser, otherwise="2")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script to run instead of the built-in test")
    parser.set_defaults(subcommand=run)


def run(options: argparse.Namespace) -> int:
    """Runs the smoke test.

    Args:
        options: the parsed arguments.

    Returns:
        0 if it passed, else the exit code of the rank that failed.

    Raises:
        LaunchError: if the job cannot be started as asked.
    """
    take_allocation(options, os.environ, least=2)  # one rank sends nothing
    if options.np is None and not (options.hosts or options.hostfile):
        options.np = 2
    words, is_module = script.parse(options.script)
    is_own = not words
    if is_own and options.strategy in ("single", PARAMETER_SERVER):
        raise LaunchError(
            f"The built-in test needs ranks that train together. Received: --strategy {options.strategy} without a "
            f"script. Expected an all-reduce. Fix: omit it, or give a script: kdist check --strategy "
            f"{options.strategy} train.py."
        )
    if is_own:
        words, is_module = ["kdist.cli.smoke"], True
    elif not is_module:
        script.check_exists(words[0])
    command = build(options, worker.program(sys.executable, words, module=is_module))
    print(f"kdist check: {command}", flush=True)
    if is_own:
        print("start       the ranks load TensorFlow, which takes some seconds", flush=True)
    failure = JobFailure(script.file_of(words[0]) if is_module else words[0])
    stderr, stdout = filters(failure, boxes=command.prints_boxes, labels=command.prints_labels)
    code = process.run(command, stderr=stderr, stdout=stdout)
    _, what, fix = (failure.cause() if code else None) or (None, "", "")
    if what:
        print(f"kdist check: {what}")
    result = "the ranks train as one process does" if is_own else "the script ended well"
    look = f"{fix.rstrip('.') or 'see above'}; `kdist env` shows what is installed and set"
    failed = f"failed with exit code {code}. Fix: {look}"
    print(f"kdist check: {f'passed: {result}' if code == 0 else failed}")
    return code
