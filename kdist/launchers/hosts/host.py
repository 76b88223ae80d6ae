"""Hosts and their slots: `-H a:2,b:2` and the hostfiles of Open MPI and MPICH."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from kdist.errors import LaunchError

# No leading dash: mpirun or ssh would read an option.
_NAME = r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%]+\])"
_ENTRY = re.compile(_NAME + r"(?::(?P<slots>[0-9]{1,6}))?")
_SLOTS = re.compile(r"slots\s*=\s*([0-9]{1,6})(?!\S)")
_MAX_SLOTS = re.compile(r"max[_-]slots\s*=\s*[0-9]+(?!\S)")
_THIS_HOST = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host of a job.

    Attributes:
        name: str, a name or an address.
        slots: int, the number of ranks that may run on it.
    """

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses `host:slots,...`.

    Args:
        text: str, hosts joined by commas; a host without slots has one.

    Returns:
        A tuple of `Host`, in order; the slots of a host named twice are added.

    Raises:
        LaunchError: if an entry is not a host, or has no slots.
    """
    return _merge(_host(entry.strip(), f"-H {text!r}") for entry in text.split(","))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parses a hostfile as Open MPI (`host slots=4`) or MPICH (`host:4`) reads it.

    Args:
        text: str, the file's content: one host a line, `#` begins a comment.
        path: str, the file's name, for messages.

    Returns:
        A tuple of `Host`, in order; the slots of a host named twice are added, a host without slots has one.

    Raises:
        LaunchError: if a line is not a host, or there is none.
    """
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    hosts = [_line(line, f"line {number} of {path}: {line!r}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise LaunchError(
            f"The hostfile names no hosts. Received: {path}, without any. Expected one host a line, as 'node1 slots=4' "
            "or 'node1:4'. Fix: add the hosts, or omit --hostfile to run on this machine."
        )
    return _merge(hosts)


def check_slots(np: int, hosts: Sequence[Host], *, oversubscribe: bool = False) -> None:
    """Raises if the number of ranks cannot be started.

    Args:
        np: int, the number of ranks.
        hosts: sequence of `Host`; without any, all of this machine.
        oversubscribe: bool, whether there may be more ranks than slots.

    Raises:
        LaunchError: if the number is not positive or exceeds the slots.
    """
    if np < 1:
        raise LaunchError(f"-np is not positive. Received: -np {np}. Expected at least 1. Fix: give -np 1 or more.")
    slots = sum(host.slots for host in hosts)
    if hosts and np > slots and not oversubscribe:
        raise LaunchError(
            f"More ranks than slots. Received: -np {np} on {','.join(map(str, hosts))}, which has {slots} slot(s). "
            f"Expected -np of at most {slots}. Fix: raise the hosts' slots (host:slots), add hosts, lower -np, "
            "or, with mpirun, add --oversubscribe."
        )


def all_local(hosts: Iterable[Host], this_host: str) -> bool:
    """Returns whether every host is this machine.

    Args:
        hosts: iterable of `Host`.
        this_host: str, this machine's name, from `socket.gethostname()`.

    Returns:
        A bool; `True` without hosts.
    """
    local = {*_THIS_HOST, this_host, this_host.split(".", 1)[0]}
    return all(host.name in local for host in hosts)


def _line(line: str, source: str) -> Host:
    entry, *remainder = line.split(maxsplit=1)
    rest = _MAX_SLOTS.sub("", "".join(remainder))
    slots = _SLOTS.search(rest)
    if _SLOTS.sub("", rest, count=1).strip():
        raise _invalid(entry, source)
    host = _host(entry, source)
    if slots is None:
        return host
    if ":" in entry.rpartition("]")[2] or int(slots[1]) < 1:
        raise _invalid(entry, source)
    return Host(host.name, int(slots[1]))


def _host(entry: str, source: str) -> Host:
    match = _ENTRY.fullmatch(entry)
    slots = 1 if match is None or match["slots"] is None else int(match["slots"])
    if match is None or slots < 1:
        raise _invalid(entry, source)
    return Host(match["name"], slots)


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _invalid(entry: str, source: str) -> LaunchError:
    return LaunchError(
        f"Invalid host {entry!r}. Received: {source}. Expected a host's name and its number of slots (at least 1), "
        "as 'node1:4' (an IPv6 address as '[::1]:4'), or in a hostfile also 'node1 slots=4'. Fix: correct this entry."
    )
