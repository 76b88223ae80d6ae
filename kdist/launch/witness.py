"""A process beside a rank that says that the rank has died, where the launcher at once ends those who could."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kdist.launch.failure import LAST_WORDS
from kdist.launch.output import REPORT

_SAID = "said"  # the file that is there once somebody has said why the job ends
_STDOUT, _STDERR = 1, 2
_DEAD = "ZX"


def is_needed(env: Mapping[str, str]) -> bool:
    """Returns whether the launcher is Hydra (MPICH's, Intel MPI's): it names a process id, or nothing at all.

    Args:
        env: mapping of variable name to value.
    """
    return "PMI_FD" in env


def begin(rank: int, size: int, directory: str, env: Mapping[str, str]) -> Callable[[], None]:
    """Lets a small process wait for this one's end.

    The first rank to die is named, for its death is the reason of the others'.

    Args:
        rank: int, this process's number.
        size: int, the number of processes, all on this host.
        directory: str, one of the job's own.
        env: mapping of variable name to value, for which `is_needed`.

    Returns:
        A function to call when there is nothing to be said: this process ends well.
    """
    reading, writing = os.pipe()
    rank_process = os.getpid()
    child = os.fork()
    if child == 0:
        # A grandchild, so that a script which waits for its children does not meet this one.
        if os.fork() == 0:
            who = f"{REPORT}{rank} of {size} on host {platform.node()}"
            _wait(rank_process, [reading, _STDERR, int(env["PMI_FD"]), _STDOUT], who, Path(directory, _SAID))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(reading)

    def dismiss() -> None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(writing, b".")

    return dismiss


def note_said(directory: str) -> None:
    """Notes that it has been said why the job ends: who dies from now on dies of that.

    Args:
        directory: str, one of the job's own; nothing happens where it is not, on another host.
    """
    with contextlib.suppress(OSError):
        Path(directory, _SAID).touch()


def _wait(pid: int, files: Sequence[int], who: str, said: Path) -> NoReturn:
    """Speaks when a process has died, and ends the job.

    Hydra, too, learns of a death by the end of its connection and of the output. Of those that it kills then it may
    meet one before the rank that died, and end with that one's exit code; and where a rank was not in MPI yet, it takes
    any code for a good end. So what it listens to is kept, until it is told.

    Args:
        pid: int, the process.
        files: sequence of descriptors: what ends with the process, where to speak, Hydra's connection, and what else is
            to be kept.
        who: str, how the process is called.
        said: path, a file of the first to speak.
    """
    try:
        os.setpgid(0, 0)  # or what ends the rank's group would end this, too
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for target, source in enumerate([os.dup(file) for file in files]):
            os.dup2(source, target)
        os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
        # The end of the rank is that of the pipe, unless a child of it holds that, too.
        while not select.select([0], [], [], 1.0)[0] and _stat(pid)[0] not in _DEAD:
            pass
        if not (select.select([0], [], [], 0)[0] and os.read(0, 1)):
            said.touch(exist_ok=False)
            code = _exit_code(pid)
            how = "has died" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
            text = (
                f"{who} {how}, without a word. Fix: look at its output and at the host's log; the kernel kills what "
                "needs more memory than there is.\n"
            )
            os.write(1, text.encode())
            time.sleep(LAST_WORDS)
            known = 1 if code is None else 128 - code if code < 0 else code
            os.write(2, f"cmd=abort exitcode={known}\n".encode())
    except OSError:
        pass  # somebody was first, or the job's directory is gone
    finally:
        os._exit(0)


def _exit_code(pid: int) -> int | None:
    """Returns a process's exit code, or less than 0, as soon as it has one; `None` if Hydra has it already."""
    while (found := _stat(pid))[0] not in _DEAD:
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(int(found[-1])) if len(found) > 1 else None


def _stat(pid: int) -> list[str]:
    """Returns what the kernel says of a process, from its state on, to its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]
