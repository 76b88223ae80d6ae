"""Ports of this machine that are free now, and that nobody is likely to take in the meantime."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that systems hand out by themselves, to outgoing connections too: it takes seconds until a task listens.
_RANGE = range(10_000, 32_000)
_ATTEMPTS = 100


def free_ports(count: int) -> list[int]:
    """Returns ports at which nobody listens.

    Args:
        count: int, how many.

    Returns:
        A list of different ints.
    """
    with contextlib.ExitStack() as stack:
        # All are held until the last one is found, so that no two are the same.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        return [_bound(each) for each in sockets]


def _bound(held: socket.socket) -> int:
    # Not Python's own generator, which is the user's.
    for port in random.SystemRandom().sample(_RANGE, _ATTEMPTS):
        with contextlib.suppress(OSError):
            held.bind(("", port))
            return port
    held.bind(("", 0))
    return int(held.getsockname()[1])
