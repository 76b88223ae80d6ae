"""Processes of a job meet over TCP: all come to the first one, which tells each the addresses of all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from kdist.cluster import connections
from kdist.cluster.connections import keep_alive
from kdist.errors import LaunchError
from kdist.launchers.hosts.ports import free_ports

_LOG = logging.getLogger("kdist")

_MAX_LINE = 1 << 20  # characters: who has found the port by chance may send for ever
_RETRY = 0.2  # seconds between two attempts to reach number 0
_WAIT_IS_LONG = 10.0  # seconds after which number 0 logs for whom it waits


@dataclasses.dataclass(frozen=True)
class Words:
    """What those that meet are called, and what a user can do about a meeting that fails.

    Attributes:
        one: str, what each is.
        number: str, the setting of its number.
        count: str, the setting of how many there are.
        port_fix: str, what to do where the port is taken.
        missing_fix: str, what to do where one does not come.
        first_fix: str, what to do where number 0 is not reached.
    """

    one: str
    number: str
    count: str
    port_fix: str
    missing_fix: str
    first_fix: str


@dataclasses.dataclass(frozen=True)
class Member:
    """One of those that meet.

    Attributes:
        rank: int, its number, from 0 on.
        count: int, how many there are.
        host: str, the name or address of number 0.
        port: int, the port at which number 0 listens.
        num_ports: int, for how many ports it looks.
        job: str, what runs, which is the same for all.
        words: `Words`.
        meeting: str, the name of this meeting: who comes to another one has found the port by chance.
        own_host: str, the name or address by which the others reach this one; `""` for that of its way to number 0.
        note: list of what JSON can write, for the others.
    """

    rank: int
    count: int
    host: str
    port: int
    num_ports: int
    job: str
    words: Words
    meeting: str = ""
    own_host: str = ""
    note: Sequence[Any] = ()


class Told(NamedTuple):
    """What one has told the others.

    Attributes:
        addresses: list of str, its host with each of its ports.
        note: list, its `Member.note`.
    """

    addresses: list[str]
    note: list[Any]


class Channel:
    """A connection on which each line is a JSON object."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8")

    def write(self, **value: Any) -> None:
        """Sends an object; does nothing if the other side has gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(value).encode() + b"\n")

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next object; `None` after the end of the connection, or of the time in seconds."""
        try:
            self._connection.settimeout(timeout)
            said = json.loads(self._reader.readline(_MAX_LINE) or "null")
            self._connection.settimeout(None)
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def has_ended(self) -> bool:
        """Returns whether the other side has gone; it must not be sending."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection, and a `read` that waits."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@contextlib.contextmanager
def met(member: Member, timeout: float) -> Iterator[tuple[list[Told], dict[int, Channel]]]:
    """Waits until all have come.

    Args:
        member: `Member`, this one.
        timeout: float, seconds.

    Yields:
        What each has told, and the open channels: from number 0 to all others, and from these to number 0.

    Raises:
        LaunchError: if one does not come in time, or they are not of one job.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        meet = _lead if member.rank == 0 else _follow
        yield meet(member, deadline, timeout, stack)


def _lead(
    member: Member, deadline: float, timeout: float, stack: contextlib.ExitStack
) -> tuple[list[Told], dict[int, Channel]]:
    words = member.words
    try:
        server = stack.enter_context(connections.listen(member.host, member.port, member.count))
    except OSError as error:
        raise LaunchError(
            f"{words.one.capitalize()} 0 cannot listen on its port. Received: port {member.port}: "
            f"{error}. Expected a port that is free on its host. Fix: {words.port_fix}."
        ) from error
    channels: dict[int, Channel] = {}
    said: dict[int, dict[str, Any]] = {0: _hello(member, member.host)}
    warn_at = time.monotonic() + _WAIT_IS_LONG
    while len(said) < member.count:
        now = time.monotonic()
        if now > warn_at:
            warn_at = deadline
            _LOG.warning("%s 0 waits for %s %s", words.one, words.one, _missing(member, said))
        server.settimeout(max(0.001, min(deadline, warn_at) - now))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            _refuse(
                channels.values(),
                f"Not all {words.one}s have come. Received: {len(said)} of {member.count} within {timeout:g} s at "
                f"{member.host}:{member.port}; {words.one} {_missing(member, said)} is missing. Expected all of them. "
                f"Fix: {words.missing_fix}.",
            )
        channel = Channel(connection)
        stack.callback(channel.close)
        hello = channel.read(timeout=2.0)
        if hello is None or not _is_of(member, hello, said[0]):
            channel.close()
            continue  # something else that has found the port
        for rank in [rank for rank, each in channels.items() if each.has_ended()]:
            del said[rank], channels[rank]  # it may come again, as a pod that was started anew
        if problem := _problem(member, hello, said):
            _refuse([*channels.values(), channel], problem)
        said[hello["rank"]], channels[hello["rank"]] = hello, channel
    told = [Told(said[rank]["addresses"], said[rank]["note"]) for rank in range(member.count)]
    for channel in channels.values():  # one that has gone in this moment is found lost at once
        channel.write(told=told)
    return told, channels


def _is_of(member: Member, hello: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether one that has come means this meeting."""
    if hello.keys() != own.keys() or any(type(hello[key]) is not type(own[key]) for key in own):
        return False
    are_texts = all(isinstance(each, str) for each in hello["addresses"])
    # Of another number of members any rank is possible, which is told of.
    is_rank = 0 <= hello["rank"] < max(member.count, hello["count"])
    return bool(hello["meeting"] == member.meeting and are_texts and is_rank)


def _missing(member: Member, said: Mapping[int, Any]) -> str:
    return ", ".join(str(rank) for rank in range(member.count) if rank not in said)


def _problem(member: Member, hello: Mapping[str, Any], said: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what is wrong with one that has come, or `""`."""
    words = member.words
    if hello["count"] != member.count:
        return (
            f"The {words.one}s differ in their number. Received: {words.count} {member.count} on {words.one} 0 and "
            f"{hello['count']} on {words.one} {hello['rank']}. Expected the same on all. Fix: start all with one."
        )
    if hello["rank"] in said:
        return (
            f"Two {words.one}s have the number {hello['rank']}. Received: {words.number} {hello['rank']} twice. "
            f"Expected each number from 0 to {member.count - 1} once. Fix: give each {words.one} its own."
        )
    if hello["job"] != member.job:
        return (
            f"The {words.one}s start other programs. Received: {member.job} on {words.one} 0 and {hello['job']} on "
            f"{words.one} {hello['rank']}. Expected the same script and arguments. Fix: start the same command on all "
            f"{words.one}s."
        )
    return ""


def _refuse(channels: Iterable[Channel], problem: str) -> NoReturn:
    for channel in channels:
        channel.write(error=problem)
    raise LaunchError(problem)


def _follow(
    member: Member, deadline: float, timeout: float, stack: contextlib.ExitStack
) -> tuple[list[Told], dict[int, Channel]]:
    connection = _connected(member, deadline, timeout)
    channel = Channel(connection)
    stack.callback(channel.close)
    channel.write(**_hello(member, connection.getsockname()[0]))
    said = channel.read(timeout=max(1.0, deadline - time.monotonic()) + 10.0)  # number 0 gives up first, and says why
    one = member.words.one
    if said is None:
        raise LaunchError(
            f"{one.capitalize()} 0 has ended before all {one}s had come. Received: a closed connection to "
            f"{member.host}:{member.port} on {one} {member.rank}. Expected the addresses of all {one}s. Fix: look at "
            f"what {one} 0 says."
        )
    if "error" in said:
        raise LaunchError(said["error"])
    return [Told(*each) for each in said["told"]], {0: channel}


def _connected(member: Member, deadline: float, timeout: float) -> socket.socket:
    one = member.words.one
    while True:
        try:
            return socket.create_connection((member.host, member.port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Cannot connect to {one} 0. Received: {error} from {member.host}:{member.port} for "
                    f"{timeout:g} s, on {one} {member.rank}. Expected {one} 0 there. Fix: {member.words.first_fix}."
                ) from error
            time.sleep(_RETRY)


def _hello(member: Member, host: str) -> dict[str, Any]:
    host = member.own_host or host
    addresses = [connections.address(host, port) for port in free_ports(member.num_ports)]
    same = {"count": member.count, "job": member.job, "meeting": member.meeting}
    return {"rank": member.rank, **same, "addresses": addresses, "note": list(member.note)}
