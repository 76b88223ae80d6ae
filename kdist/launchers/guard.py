"""A guard process: it ends the job if what holds its pipe is killed."""

from __future__ import annotations

import logging
import signal
import sys

from kdist.launchers.process import end_session

_LOG = logging.getLogger("kdist")


def main() -> None:
    """Reads the launcher's process id, then a line when the job has ended; the pipe closes without it if killed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leader, ended = sys.stdin.readline().strip(), sys.stdin.readline()
    if leader.isdigit() and not ended:
        logging.basicConfig(format="[kdist] %(message)s")
        _LOG.warning("`kdist run` was killed: ending its job")
        end_session(int(leader))
