"""TCP between the hosts of a job: where this one is reached, and connections that notice a lost host."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915  # the request of Linux for the address of an interface


def own_hosts() -> list[str]:
    """Returns the addresses at which other hosts may reach this one, likeliest first."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the outgoing interface
        found.append(probe.getsockname()[0])
    # A network of compute nodes often has no route to other networks.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24]))
    # In Debian's /etc/hosts the host's name has a loopback address.
    with contextlib.suppress(OSError):
        found += [each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return [*dict.fromkeys(host for host in found if not host.startswith("127.")), socket.gethostname()]


def connect(hosts: Sequence[str], port: int, timeout: float = 20.0) -> socket.socket:
    """Connects to the first address of a host that answers; reads from the connection wait without limit.

    Args:
        hosts: sequence of str, as from `own_hosts` there.
        port: int.
        timeout: float, seconds to connect, shared out among the addresses.

    Raises:
        OSError: if none answers.
    """
    for place, host in enumerate(hosts):
        try:
            connection = socket.create_connection((host, port), timeout / len(hosts))
        except OSError:
            if place == len(hosts) - 1:
                raise
        else:
            connection.settimeout(None)
            return connection
    raise OSError(f"no address is known for port {port}")


def keep_alive(connection: socket.socket) -> None:
    """Makes a connection end half a minute after its other host is lost, which says nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
