"""TCP between the hosts of a job: where this one is reached, and connections that notice a lost host."""

from __future__ import annotations

import contextlib
import errno
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
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            found += [each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, family)]
    others = [host for host in found if not host.startswith(("127.", "::1", "fe80:"))]
    return [*dict.fromkeys(others), socket.gethostname()]


def address(host: str, port: int) -> str:
    """Returns a host and a port as one word, as in `TF_CONFIG`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Returns what an address, as `address` returns it, was made of."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_known(host: str) -> bool:
    """Returns whether this host can look up another one's name."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Returns a socket that this and other hosts reach by a name of this one, over IPv4 and IPv6.

    It listens on all interfaces: in Debian's /etc/hosts the host's name has a loopback address, and the name may be
    that of a gateway.

    Args:
        host: str, the name or address; what is written as an address of the loopback interface is reached there only.
        port: int; 0 for any.
        backlog: int, how many may connect at once.

    Raises:
        OSError: if the port is in use.
    """
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((host, port), backlog=backlog)
    if host == "::1":
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    return socket.create_server(("", port), backlog=backlog)  # without IPv6


def connect(hosts: Sequence[str], port: int, timeout: float = 20.0) -> socket.socket:
    """Connects to the first address of a host that answers; reads from the connection wait without limit.

    Args:
        hosts: sequence of str, as from `own_hosts` there.
        port: int.
        timeout: float, seconds to connect, split over the addresses.

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
