"""`kdist plan`: what each rank will hold in memory, before anything trains."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.cli import script
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.parser import count, positive_seconds
from kdist.errors import KDistError
from kdist.launchers.process import received_signals
from kdist.launchers.start import module_command
from kdist.planning.memory import Sizes
from kdist.planning.plan import make_plan

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DOES_NOT_FIT = 3
"""The exit code where no strategy fits."""

_CHILD = "kdist.planning.child"  # which imports TensorFlow

# Freed memory goes back to the system: only then is the peak that of what is held.
_SETTINGS = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": "-1"}


def add_parser(subcommands: _SubParsersAction[Any]) -> None:
    """Adds the subcommand to the command line.

    Args:
        subcommands: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "plan",
        help="say what each rank will hold in memory, and whether it fits",
        description="Run a script up to its first fit in a scope, and say what each rank would hold in memory.",
        usage="kdist plan -np N [options] SCRIPT [ARGS...]\n       kdist plan -np N [options] -m MODULE [ARGS...]",
        allow_abbrev=False,
    )
    parser.add_argument("-np", type=count, required=True, metavar="N", help="the number of ranks")
    parser.add_argument("--memory", metavar="SIZE", help="what each rank may take, as 24GB")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="how long the script may run (1800)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    script.add_arguments(parser, "plan")
    parser.set_defaults(subcommand=run)


def run(options: argparse.Namespace) -> int:
    """Plans a script.

    Args:
        options: the parsed arguments.

    Returns:
        0 if a strategy fits or no memory was given, 3 if none does.

    Raises:
        KDistError: if the arguments are wrong, or the script fails or fits no model of a scope.
    """
    make_plan(Sizes(0, 0, 0, 0, 1), options.np, options.memory)  # refuses before the script runs
    words, is_module = script.required(options, "plan")
    plan = make_plan(_find_sizes(words, is_module, options.timeout), options.np, options.memory)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0 if plan.fits else DOES_NOT_FIT


def _find_sizes(words: Sequence[str], is_module: bool, timeout: float) -> Sizes:
    """Returns the sizes that the script's process measured, or counted where that is not possible."""
    counted, failure = _child("count", words, is_module, timeout)
    if counted is not None and 1.5 * (counted.weights + counted.slots + counted.trained) > _memory():
        tell("the model is too large for this host to be measured: activations are estimated from its graph")
        return counted
    measured, failure = _child("measure", words, is_module, timeout)
    if measured is not None:
        return measured
    if counted is None:
        raise KDistError(
            f"The script failed before its first fit. Received: exit code {failure[0]} of {words[0]}. Expected a "
            f"script that runs in one process. Fix: see its output:\n{failure[1]}"
        )
    tell(f"the steps of few rows failed with exit code {failure[0]}: activations are estimated from the graph")
    return counted


def _child(way: str, words: Sequence[str], is_module: bool, timeout: float) -> tuple[Sizes | None, tuple[int, str]]:
    """Returns what a process of the script found, or `None` and why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*module_command(sys.executable, _CHILD), way, str(report), "module" if is_module else "script"]
        env = {name: value for name, value in os.environ.items() if name != "KDIST_STRATEGY"}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", **_SETTINGS}
        code, output = _run([*command, *words], env, timeout)
        if not report.exists():
            return None, (code, output[-3000:])
        found = json.loads(report.read_text())
    if "error" in found:
        raise KDistError(found["error"])
    return Sizes(**found), (0, "")


def _run(command: Sequence[str], env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and what it said.

    Raises:
        KDistError: if it takes longer than a time limit; then it is ended, with all that it has started.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a child of the script could hold a pipe open
        with received_signals() as received:
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True
            )
            try:
                code = _wait(process, timeout, received)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def _wait(process: subprocess.Popen[Any], timeout: float, received: Sequence[int]) -> int:
    deadline = time.monotonic() + timeout
    while not received and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(0.2, timeout))
    if received:
        raise SystemExit(128 + received[0])
    raise KDistError(
        f"The script took too long to plan. Received: no model's first step within {timeout:g} s. Expected one from "
        "which memory can be read. Fix: --timeout with more seconds, or less data before the first fit."
    )


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
