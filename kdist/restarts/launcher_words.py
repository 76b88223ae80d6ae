"""What launchers that are not kdist's say of a failure: mpirun of Open MPI, and horovodrun."""

from __future__ import annotations

import re
import signal

from kdist.restarts.events import Failure, Kind

# Open MPI 4 and 5 break this sentence over two lines.
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+)\s+exited on\s+signal (\d+)")
_LOST_HOST = re.compile(r"has lost communication with a remote daemon.*?Remote daemon:[^\n]*? on node (\S+)", re.DOTALL)
_EXITED = re.compile(r"Process name: (?:\[\S+,)?(\d+)\]?\s+Exit (?:code|status): +(-?\d+)")
_EXITED_EARLY = re.compile(r"Process (\d+) exit with status code (-?\d+)\.")  # horovodrun, on stdout
_HOROVOD_PREFIX = re.compile(r"^\[\d+,?\d*\]<std(?:err|out)>:", re.MULTILINE)


def failure_in(text: str) -> Failure | None:
    """Returns the failure that a launcher reports, or `None`.

    Args:
        text: str, the end of its standard error.
    """
    text = _HOROVOD_PREFIX.sub("", text)
    if found := _KILLED.search(text):
        return _killed(int(found[3]), int(found[1]), found[2])
    if found := _LOST_HOST.search(text):
        return Failure(Kind.LOST, f"host {found[1]} was lost", None, found[1], from_launcher=True)
    if found := _EXITED.search(text) or _EXITED_EARLY.search(text):
        code = int(found[2])
        if code < 0 or is_signal(code):
            return _killed(abs(code) % 128, int(found[1]))
        return Failure(Kind.EXIT, f"exited with code {code}", int(found[1]), from_launcher=True)
    return None


def failure_of_code(code: int) -> Failure | None:
    """Returns the failure that an exit code alone tells, or `None`.

    Args:
        code: int, the launcher's exit code.
    """
    if not is_signal(code):
        return None
    text = f"the launcher, or a rank that it did not name, {killed_by(code - 128)}"
    return Failure(Kind.SIGNAL, text, from_launcher=True)


def is_signal(code: int) -> bool:
    """Returns whether an exit code is that of a shell for a program that a signal ended.

    Args:
        code: int, from 0 to 255.
    """
    return code - 128 in set(signal.Signals)


def killed_by(number: int) -> str:
    """Returns the words for a process that a signal has ended.

    Args:
        number: int, the signal's.
    """
    name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"was killed by signal {number}{name}"


def _killed(number: int, rank: int | None = None, host: str = "") -> Failure:
    return Failure(Kind.SIGNAL, killed_by(number), rank, host, from_launcher=True)
