"""A disk on which nothing more fits, for this process: a limit that anybody may set, unlike a small file system."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


def fill_disk(room: int = 64) -> tuple[int, int]:
    """Lets no file grow beyond `room` bytes: what is longer is cut off, and an `OSError` says so.

    Python ignores the signal that comes with it (SIGXFSZ). Pipes and the network are as before.

    Returns:
        The limits before, for `resource.setrlimit`.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    return before


@contextlib.contextmanager
def full_disk(room: int = 64) -> Iterator[None]:
    """Does the same while the context is open."""
    before = fill_disk(room)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
