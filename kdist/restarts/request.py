"""The request to all ranks of a running job to save and leave: a file that rank 0 finds on its host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def path_of(directory: str | Path) -> str:
    """Returns the path of the file that is the request.

    Args:
        directory: str or path, the job's, which need not exist on the host of rank 0.
    """
    return f"{directory}.leave"


def is_made(directory: Path | None) -> bool:
    """Returns whether the ranks of a job are asked to leave.

    Args:
        directory: `Path` or `None`, the job's; `None` for a job that nobody asks.
    """
    if directory is None:
        return False
    with contextlib.suppress(OSError):
        return os.stat(path_of(directory)).st_uid == os.getuid()  # another user may write to /tmp
    return False


def remove(directory: str | Path) -> None:
    """Removes the request.

    Args:
        directory: str or path, the job's.
    """
    with contextlib.suppress(OSError):
        os.unlink(path_of(directory))
