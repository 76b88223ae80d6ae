"""Ends a job whose `kdist run` was killed, which tells it of the job through a pipe: `python -m kdist.launch.guard`."""

from __future__ import annotations

import logging
import signal
import sys

from kdist.launch.process import end_session

_LOG = logging.getLogger("kdist")


def main() -> None:
    """Reads the launcher's process id, and a word when the job has ended; what comes after neither is the end."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leader, ended = sys.stdin.readline().strip(), sys.stdin.readline()
    if leader.isdigit() and not ended:
        logging.basicConfig(format="[kdist] %(message)s")
        _LOG.warning("`kdist run` was killed: its job is ended")
        end_session(int(leader))


if __name__ == "__main__":
    main()
