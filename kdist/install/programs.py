"""Runs the programs of an installation, above all pip."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from kdist.errors import InstallError


def pip() -> list[str]:
    """Returns the command that runs pip for this Python: its own, or another one that supports `--python`.

    Raises:
        InstallError: if there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise InstallError(
            f"pip was not found. Received: none for {sys.executable}, none on PATH. Expected it. Fix: python -m "
            "ensurepip"
        )
    return [other, "--python", sys.executable]


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Runs a program until it exits.

    Args:
        command: sequence of str, the program and its arguments.
        env: mapping, its whole environment; by default this process's.
        timeout: float or `None`, the time limit in seconds.

    Returns:
        A str, its stdout and stderr.

    Raises:
        InstallError: if it fails, with the end of its output.
    """
    try:
        done = subprocess.run(
            command,
            env=env,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise InstallError(
            f"A program failed. Received: {err}. Expected: exit code 0. Fix: run it in a shell."
        ) from err
    if done.returncode:
        raise InstallError(
            f"A program failed. Received: exit code {done.returncode} from {' '.join(command)}, with the output:\n"
            f"{done.stdout[-3000:].strip()}\nExpected: exit code 0. Fix: the cause in this output."
        )
    return done.stdout


def run_logged(command: Sequence[str], *, env: Mapping[str, str], log: str, on_line: Callable[[str], None]) -> int:
    """Runs a program until it exits, writes its output to a file, and calls a function with each line.

    Args:
        command: sequence of str, the program and its arguments.
        env: mapping, its whole environment.
        log: str, the file.
        on_line: function of a line.

    Returns:
        Its exit code.
    """
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            on_line(line)
    return process.returncode
