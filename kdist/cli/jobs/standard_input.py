"""Where rank 0 reads the standard input of `kdist run`."""

from __future__ import annotations

import os
import stat


def input_path(*, is_on_several_hosts: bool) -> str | None:
    """Returns the file that rank 0 opens as its standard input: Open MPI's `mpirun` never tells it of the end.

    Args:
        is_on_several_hosts: bool, whether rank 0 may be on another host.

    Returns:
        A path, or `None` where the launcher passes the input on: of a terminal, of a socket, to another host, of a file
        that has been read in part, and of a pipe of another user.
    """
    try:
        own = os.fstat(0)
    except OSError:  # it is closed
        return os.devnull
    if os.path.samestat(own, os.stat(os.devnull)):
        return os.devnull
    is_whole = stat.S_ISREG(own.st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0
    path = f"/proc/{os.getpid()}/fd/0"
    if is_on_several_hosts or not (is_whole or stat.S_ISFIFO(own.st_mode)) or not os.access(path, os.R_OK):
        return None
    return path
