"""Runs a command to its end or to a time limit, and ends everything that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

ENVIRONMENT = {  # of all that is measured
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# With it kdist is compiled at each start, and what pip installs is not.
NOT_A_USERS = ("PYTHONDONTWRITEBYTECODE",)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # TensorFlow counts the cores that a process may run on, what OpenMP starts not
MARK = "KDIST_BENCHMARK_LAUNCH"
GRACE = 10.0  # seconds that a launcher has to end its processes by itself


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        problem: str, why it did not end well; `""` if it did.
        output: str, its stdout and stderr together.
    """

    problem: str
    output: str


def run(command: Sequence[str], env: Mapping[str, str], limit: float) -> Ended:
    """Runs a command.

    Args:
        command: sequence of str.
        env: mapping, environment variables on top of `ENVIRONMENT` and this process's own, less `NOT_A_USERS`.
        limit: float, seconds that it may take.

    Returns:
        An `Ended`. If this process is interrupted, all that was started is ended first.
    """
    mark = uuid.uuid4().hex
    # An mpirun that is killed leaves files, named by its process id, at which a later one gives up: hence a TMPDIR. The
    # output is a file, for an orphan could hold a pipe open.
    with (
        tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as temporary,
        tempfile.TemporaryFile() as output,
    ):
        own = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS}
        environment = {**own, "TMPDIR": temporary, **ENVIRONMENT, **env, MARK: mark}
        problem = ""
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit)
            problem = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"was not done after {limit:g} s"
        finally:
            end(process, mark)
        output.seek(0)
        return Ended(problem, output.read().decode(errors="replace"))


def run_well(command: Sequence[str], env: Mapping[str, str], limit: float) -> None:
    """Runs a command, see `run`; if it does not end well, its last lines are this script's."""
    ended = run(command, env, limit)
    if ended.problem:
        sys.exit(f"{ended.output[-4000:]}\n`{shlex.join(command)}` {ended.problem}")


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends a command and all that it started: first asked to, then by force."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Launchers put their ranks into process groups and sessions of their own, out of reach of killpg.
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()
