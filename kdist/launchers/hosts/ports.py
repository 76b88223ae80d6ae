"""Free TCP ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

PORTS = range(10_000, 32_000)
"""Ports to choose from.

They are below the ephemeral ports: the system could assign one of those before the task listens, seconds later.
"""

_ATTEMPTS = 100


def free_ports(count: int) -> list[int]:
    """Returns ports that no process listens on.

    Args:
        count: int, how many.

    Returns:
        A list of different ints.
    """
    with contextlib.ExitStack() as stack:
        # All stay bound until the last one is found, so that no two are the same.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        return [_bind(each) for each in sockets]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields a port that no process listens on, and that no other process finds meanwhile."""
    with socket.socket() as held:
        yield _bind(held)


def _bind(unbound: socket.socket) -> int:
    # Not `random.sample`: its state is the user's.
    for port in random.SystemRandom().sample(PORTS, _ATTEMPTS):
        with contextlib.suppress(OSError):
            unbound.bind(("", port))
            return port
    unbound.bind(("", 0))
    return int(unbound.getsockname()[1])
