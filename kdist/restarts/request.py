"""The request to all ranks of a running job to save and leave: a file that rank 0 finds on its host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LARGER_JOB, NOTICE = "a larger job", "SIGUSR1 to `kdist run`"
"""Why ranks are asked, in words: for a larger job, or since `kdist run` has received a notice."""

_ENDINGS = {NOTICE: "notice", LARGER_JOB: "leave"}  # of the file's name


def path_of(directory: str | Path, why: str) -> str:
    """Returns the path of the file that is the request, in `/tmp`: each host has it, and TMPDIR may be of one alone.

    Args:
        directory: str or path, the job's, whose name no other job has; it need not exist on the host of rank 0.
        why: str, `LARGER_JOB` or `NOTICE`.
    """
    return f"/tmp/{os.path.basename(directory)}.{_ENDINGS[why]}"


def read(directory: Path | None) -> str | None:
    """Returns why the ranks of a job are asked to leave, `LARGER_JOB` or `NOTICE`; `None` if they are not asked.

    Args:
        directory: `Path` or `None`, the job's; `None` for a job that nobody asks.
    """
    if directory is None:
        return None
    for why in _ENDINGS:
        with contextlib.suppress(OSError):
            if os.stat(path_of(directory, why)).st_uid == os.getuid():  # another user may write to /tmp
                return why
    return None


def remove(directory: str | Path) -> None:
    """Removes the request.

    Args:
        directory: str or path, the job's.
    """
    for why in _ENDINGS:
        with contextlib.suppress(OSError):
            os.unlink(path_of(directory, why))
