"""Tests an installed Horovod: an all-reduce between two processes over each controller."""

from __future__ import annotations

import os
import sys

from kdist.errors import InstallError
from kdist.install import programs
from kdist.launchers import horovodrun, mpirun
from kdist.launchers.command import Command

_PROGRAM = (sys.executable, "-m", "kdist.install.smoke")
_TIMEOUT = 300.0  # seconds
_RANKS = 2


def verify(*, with_mpi: bool) -> None:
    """Runs two processes over Gloo and, if asked, two over MPI.

    Args:
        with_mpi: bool, whether to test MPI, too.

    Raises:
        InstallError: if their sum is wrong or they fail.
        LaunchError: if they cannot be started.
    """
    search_path = os.environ.get("PATH", "")
    start = (horovodrun.find(sys.executable, search_path), "-np", str(_RANKS))  # as users start it
    _run("Gloo", Command((*start, "--gloo", *_PROGRAM)))
    if with_mpi:
        directory = os.path.dirname(mpirun.find(sys.executable, search_path).path)
        _run("MPI", Command((*start, "--mpi", *_PROGRAM), {"PATH": os.pathsep.join([directory, search_path])}))


def _run(controller: str, command: Command) -> None:
    try:
        programs.run(command.argv, env={**os.environ, **command.env}, timeout=_TIMEOUT)
    except InstallError as err:
        raise InstallError(f"Horovod is installed but does not work over {controller}. {err}") from err
