"""A rendezvous over TCP: all participants connect to the first one, which sends each the addresses of all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from kdist.cluster import connections
from kdist.cluster.connections import keep_alive
from kdist.errors import LaunchError
from kdist.launchers.hosts.ports import free_ports

_LOG = logging.getLogger("kdist")

_MAX_LINE = 1 << 20  # characters: who has found the port by chance may send for ever
_RETRY = 0.2  # seconds between two attempts to reach participant 0
_WAIT_IS_LONG = 10.0  # seconds after which participant 0 logs for whom it waits


@dataclasses.dataclass(frozen=True)
class RendezvousTexts:
    """What the participants of a rendezvous are called, and what a user can do if it fails.

    Attributes:
        one: str, what each participant is, as `"node"`.
        number: str, the setting of its number.
        count: str, the setting of how many there are.
        port_fix: str, what to do where the port is taken.
        missing_fix: str, what to do where one is missing.
        first_fix: str, what to do where the first one cannot be reached.
    """

    one: str
    number: str
    count: str
    port_fix: str
    missing_fix: str
    first_fix: str


@dataclasses.dataclass(frozen=True)
class Participant:
    """A participant of a rendezvous.

    Attributes:
        rank: int, its number, from 0 on.
        count: int, how many there are.
        host: str, the name or address of participant 0.
        port: int, the port at which participant 0 listens.
        num_ports: int, for how many ports it looks.
        job: str, what runs, which is the same for all.
        texts: `RendezvousTexts`.
        name: str, that of the rendezvous: a participant of another one has found the port by chance.
        own_host: str, the name or address by which the others reach this one; `""` for that of its connection to
            participant 0.
        payload: list of what JSON can write, which every other participant receives.
    """

    rank: int
    count: int
    host: str
    port: int
    num_ports: int
    job: str
    texts: RendezvousTexts
    name: str = ""
    own_host: str = ""
    payload: Sequence[Any] = ()


class ParticipantInfo(NamedTuple):
    """What every participant learns of one.

    Attributes:
        addresses: list of str, its host with each of its ports.
        payload: list, its `Participant.payload`.
    """

    addresses: list[str]
    payload: list[Any]


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
            self._connection.settimeout(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            found = json.loads(self._reader.readline(_MAX_LINE) or "null")
            self._connection.settimeout(None)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

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
def rendezvous(participant: Participant, timeout: float) -> Iterator[tuple[list[ParticipantInfo], dict[int, Channel]]]:
    """Waits until all participants have come.

    Args:
        participant: `Participant`, this one.
        timeout: float, seconds.

    Yields:
        The `ParticipantInfo` of each, and the open channels: from participant 0 to all others, from these to it.

    Raises:
        LaunchError: if a participant does not come in time, or they are not of one job.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        attend = _lead if participant.rank == 0 else _follow
        yield attend(participant, deadline, timeout, stack)


def _lead(
    participant: Participant, deadline: float, timeout: float, stack: contextlib.ExitStack
) -> tuple[list[ParticipantInfo], dict[int, Channel]]:
    texts = participant.texts
    try:
        server = stack.enter_context(connections.listen(participant.host, participant.port, participant.count))
    except OSError as error:
        raise LaunchError(
            f"{texts.one.capitalize()} 0 cannot listen on its port. Received: port {participant.port}: "
            f"{error}. Expected a port that is free on its host. Fix: {texts.port_fix}."
        ) from error
    channels: dict[int, Channel] = {}
    try:
        hellos = _all_hellos(participant, server, channels, deadline, timeout, stack)
    except LaunchError:  # which those that have come know
        raise
    except BaseException:  # Ctrl-C, or a scheduler's signal: the others would try again
        _tell(
            channels.values(),
            f"{texts.one.capitalize()} 0 was ended before all {texts.one}s had come. Received: the end of "
            f"{participant.host}:{participant.port}. Expected the addresses of all {texts.one}s. Fix: start all again.",
        )
        raise
    server.close()  # who comes later, as to a next job at this port, tries again
    infos = [ParticipantInfo(hellos[rank]["addresses"], hellos[rank]["payload"]) for rank in range(participant.count)]
    for channel in channels.values():  # one that has gone in this moment is found lost at once
        channel.write(participants=infos)
    return infos, channels


def _all_hellos(
    participant: Participant,
    server: socket.socket,
    channels: dict[int, Channel],
    deadline: float,
    timeout: float,
    stack: contextlib.ExitStack,
) -> dict[int, dict[str, Any]]:
    """Waits until all participants have come, adds their channels, and returns what each has said of itself."""
    texts = participant.texts
    hellos: dict[int, dict[str, Any]] = {0: _hello(participant, participant.host)}
    warn_at = time.monotonic() + _WAIT_IS_LONG
    while len(hellos) < participant.count:
        now = time.monotonic()
        if now > warn_at:
            warn_at = deadline
            _LOG.warning("%s 0 waits for %s %s", texts.one, texts.one, _missing(participant, hellos))
        server.settimeout(max(0.001, min(deadline, warn_at, now + threading.TIMEOUT_MAX) - now))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            _refuse(
                channels.values(),
                f"Not all {texts.one}s have come. Received: {len(hellos)} of {participant.count} within {timeout:g} s "
                f"at {participant.host}:{participant.port}; {texts.one} {_missing(participant, hellos)} is missing. "
                f"Expected all of them. Fix: {texts.missing_fix}.",
            )
        channel = Channel(connection)
        stack.callback(channel.close)
        hello = channel.read(timeout=2.0)
        if hello is None or not _is_of(participant, hello, hellos[0]):
            channel.close()
            continue  # something else that has found the port
        for rank in [rank for rank, each in channels.items() if each.has_ended()]:
            del hellos[rank], channels[rank]  # it may come again, as a pod that was started again
        if problem := _problem(participant, hello, hellos):
            _refuse([*channels.values(), channel], problem)
        hellos[hello["rank"]], channels[hello["rank"]] = hello, channel
    return hellos


def _is_of(participant: Participant, hello: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether what has connected is a participant of this rendezvous."""
    if hello.keys() != own.keys() or any(type(hello[key]) is not type(own[key]) for key in own):
        return False
    are_texts = all(isinstance(each, str) for each in hello["addresses"])
    # Of another number of participants any rank is possible, which is told of.
    is_rank = 0 <= hello["rank"] < max(participant.count, hello["count"])
    return bool(hello["name"] == participant.name and are_texts and is_rank)


def _missing(participant: Participant, hellos: Mapping[int, Any]) -> str:
    return ", ".join(str(rank) for rank in range(participant.count) if rank not in hellos)


def _problem(participant: Participant, hello: Mapping[str, Any], hellos: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what is wrong with a participant that has come, or `""`."""
    texts = participant.texts
    if hello["count"] != participant.count:
        return (
            f"The {texts.one}s differ in their number. Received: {texts.count} {participant.count} on {texts.one} 0 "
            f"and {hello['count']} on {texts.one} {hello['rank']}. Expected the same on all. Fix: start all with one."
        )
    if hello["rank"] in hellos:
        return (
            f"Two {texts.one}s have the number {hello['rank']}. Received: {texts.number} {hello['rank']} twice. "
            f"Expected each number from 0 to {participant.count - 1} once. Fix: give each {texts.one} its own."
        )
    if hello["job"] != participant.job:
        return (
            f"The {texts.one}s start other programs. Received: {participant.job} on {texts.one} 0 and {hello['job']} "
            f"on {texts.one} {hello['rank']}. Expected the same script and arguments. Fix: start the same command on "
            f"all {texts.one}s."
        )
    return ""


def _refuse(channels: Iterable[Channel], problem: str) -> NoReturn:
    _tell(channels, problem)
    raise LaunchError(problem)


def _tell(channels: Iterable[Channel], problem: str) -> None:
    for channel in channels:
        channel.write(error=problem)


def _follow(
    participant: Participant, deadline: float, timeout: float, stack: contextlib.ExitStack
) -> tuple[list[ParticipantInfo], dict[int, Channel]]:
    one = participant.texts.one
    is_logged = False
    while True:
        connection = _connected(participant, deadline, timeout)
        channel = Channel(connection)
        stack.callback(channel.close)
        channel.write(**_hello(participant, connection.getsockname()[0]))
        # Participant 0 gives up first, and says why.
        answer = channel.read(timeout=max(1.0, deadline - time.monotonic()) + 10.0)
        if answer is not None:
            break
        channel.close()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{one.capitalize()} 0 has ended before all {one}s had come. Received: a closed connection to "
                f"{participant.host}:{participant.port} on {one} {participant.rank}. Expected the addresses of all "
                f"{one}s. Fix: look at what {one} 0 says."
            )
        if not is_logged:  # it may be started again, or what listened may be of another job
            is_logged = True
            _LOG.warning("%s 0 has closed its connection to %s %d, which tries again", one, one, participant.rank)
        time.sleep(_RETRY)
    if "error" in answer:
        raise LaunchError(answer["error"])
    return [ParticipantInfo(*each) for each in answer["participants"]], {0: channel}


def _connected(participant: Participant, deadline: float, timeout: float) -> socket.socket:
    one = participant.texts.one
    while True:
        try:
            return socket.create_connection((participant.host, participant.port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Cannot connect to {one} 0. Received: {error} from {participant.host}:{participant.port} for "
                    f"{timeout:g} s, on {one} {participant.rank}. Expected {one} 0 there. Fix: "
                    f"{participant.texts.first_fix}."
                ) from error
            time.sleep(_RETRY)


def _hello(participant: Participant, host: str) -> dict[str, Any]:
    host = participant.own_host or host
    addresses = [connections.address(host, port) for port in free_ports(participant.num_ports)]
    same = {"count": participant.count, "job": participant.job, "name": participant.name}
    return {"rank": participant.rank, **same, "addresses": addresses, "payload": list(participant.payload)}
