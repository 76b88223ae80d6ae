"""Runs the programs that an installation needs, above all pip."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from kdist.errors import InstallError


def pip() -> list[str]:
    """Returns the command that runs pip for this Python: its own, or another one that serves it.

    Raises:
        InstallError: if there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise InstallError(
            f"No pip. Received: none for {sys.executable}, nor on PATH. Expected one. Fix: python -m ensurepip"
        )
    return [other, "--python", sys.executable]


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Runs a program to its end.

    Args:
        command: sequence of str, the program and its arguments.
        env: mapping, its whole environment; by default this process's.
        timeout: float or `None`, seconds that it may take.

    Returns:
        What it wrote to stdout and stderr, a str.

    Raises:
        InstallError: if it fails; with its last words.
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
        raise InstallError(f"A program failed. Received: {err}. Expected: its success. Fix: run it by itself.") from err
    said = done.stdout
    if done.returncode:
        raise InstallError(
            f"A program failed. Received: exit code {done.returncode} from {' '.join(command)}, which said:\n"
            f"{said[-3000:].strip()}\nExpected: its success. Fix: what it says, if it says so."
        )
    return said


def follow(command: Sequence[str], *, env: Mapping[str, str], log: str, hear: Callable[[str], None]) -> int:
    """Runs a program to its end, keeping all that it says in a file and passing it on, line by line.

    Args:
        command: sequence of str, the program and its arguments.
        env: mapping, its whole environment.
        log: str, the file.
        hear: function of a line.

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
            hear(line)
    return process.returncode
