"""What a job leaves in the memory of this host when it has ended: copies of checkpoints that are newer than the disk's.

The command that follows is another job, which looks on disk alone.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import Any

from kdist.cli.jobs.message import tell
from kdist.errors import CheckpointError
from kdist.restarts.memory import directory_of

_PATIENCE = 5.0  # seconds, in which the last ranks of the job release their lock


def delete(job: str) -> None:
    """Deletes the copies of a job that has ended well; a host that an attempt has left still has some.

    Args:
        job: str, what distinguishes the job from others.
    """
    shutil.rmtree(directory_of(job), ignore_errors=True)


def write(job: str) -> bool:
    """Writes the newest copy of each training to its `backup_dir`, if it is newer than what is there, and deletes them.

    What cannot be written is left, and said.

    Args:
        job: str, what distinguishes the job from others.

    Returns:
        Whether nothing is left.
    """
    if not directory_of(job).is_dir():
        return True
    from kdist.checkpoint.storage.memory_copies import left_by  # NumPy takes a while to import

    are_written = [_is_written(job, *each) for each in left_by(job).items()]
    if all(are_written):
        delete(job)
    return all(are_written)


def _is_written(job: str, backup_dir: str, copy: Any) -> bool:
    from kdist.checkpoint.storage.files import CheckpointDirectory

    folder, on_disk = CheckpointDirectory(backup_dir), 0
    try:
        folder.lock.acquire(_PATIENCE)  # a rank of the job may live on another host: its lock is not taken over
        with contextlib.suppress(CheckpointError):  # none can be read
            if (found := folder.read()) is not None:
                on_disk = found[1]["training"].get("number", 0)
        if copy["training"]["number"] > on_disk:
            place = folder.write(copy)
            tell(f"the newest checkpoint was in memory, and is now in {place}: the same command goes on from there")
    except (CheckpointError, OSError, ValueError) as error:
        tell(
            f"the newest checkpoint is left in memory, in {directory_of(job)}, for a day at least. Received: "
            f"{str(error).rstrip('.')}. Fix: free some space, or end what has the lock, then: python -m "
            f"kdist.cli.jobs.left_copies {job}"
        )
        return False
    finally:
        folder.lock.release()
    return True


if __name__ == "__main__":
    sys.exit(not write(sys.argv[1]))
