"""Hosts that are names for this one: what mpirun and kdist reach them by lets them be down, and they can be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

_MARK = "SIMULATED_HOST"

# In the place of ssh. MPI tells hosts apart by their names.
_AGENT = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
host=$1; shift
[ -e {folder}/down-$host ] && exit 255
export {mark}=$host
exec unshare --uts sh -c "hostname $host; $*"
"""


class SimulatedHosts:
    """Hosts of any name but this one's.

    Args:
        folder: path, which ranks know as well.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def agent(self) -> str:
        """Returns the program that runs commands on them; skips the test where hosts cannot have names of their own."""
        if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
            pytest.skip("this machine forbids a host name of a process's own")
        path = self._folder / "agent.sh"
        path.write_text(_AGENT.format(folder=self._folder, mark=_MARK))
        path.chmod(0o755)
        return os.fspath(path)

    def stop(self, name: str) -> None:
        """Takes a host down: its processes are killed, and it does not answer."""
        (self._folder / f"down-{name}").touch()
        for directory in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if f"{_MARK}={name}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                    os.kill(int(directory.name), signal.SIGKILL)

    def start(self, name: str) -> None:
        """Takes it up again."""
        (self._folder / f"down-{name}").unlink(missing_ok=True)
