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


def make(directory: str | Path, why: str) -> None:
    """Asks the ranks of a job to leave; rank 0 must be on this host.

    Args:
        directory: str or path, the job's.
        why: str, in words.
    """
    target = Path(path_of(directory))
    with contextlib.suppress(OSError):
        unfinished = Path(directory, target.name)  # in a directory of this user only; a reader must not see half of it
        unfinished.write_text(why)
        unfinished.rename(target)


def read(directory: Path | None) -> str | None:
    """Returns why the ranks of a job are asked to leave, an empty text for a larger job; `None` if they are not asked.

    Args:
        directory: `Path` or `None`, the job's; `None` for a job that nobody asks.
    """
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        path = path_of(directory)
        if os.stat(path).st_uid == os.getuid():  # another user may write to /tmp
            return Path(path).read_text()
    return None


def remove(directory: str | Path) -> None:
    """Removes the request.

    Args:
        directory: str or path, the job's.
    """
    with contextlib.suppress(OSError):
        os.unlink(path_of(directory))
