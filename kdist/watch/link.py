"""How ranks hear of each other beside their collectives: every rank tells rank 0, which judges, over TCP."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from kdist.watch.activity import Activity
from kdist.watch.verdict import Sign, Verdict, judge

_PERIOD = 1.0  # seconds between two reports
_HEAD_START = 3.0  # seconds that rank 0 gets to end the job, before another rank does
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_LONGEST = 1 << 16  # bytes of a message


class Watch:
    """Watches over the ranks of a job, in a thread of its own on each.

    Args:
        activity: `Activity`, what this rank does.
        rank: int, this process's number.
        size: int, the number of ranks.
        end: function of a text (empty on ranks that leave the word to rank 0), which says it and ends the job.
        warn: function of a text, which says it.

    Attributes:
        stall_timeout: float or `None`, seconds after which a rank that makes no progress is given up.
        is_strict: bool, whether that holds for ranks that compute or are in the user's own code, too.
    """

    def __init__(
        self, activity: Activity, rank: int, size: int, end: Callable[[str], Any], warn: Callable[[str], Any]
    ) -> None:
        self.stall_timeout: float | None = 600.0
        self.is_strict = False
        self._activity = activity
        self._rank = rank
        self._size = size
        self._end = end
        self._warn = warn
        self._warned: set[tuple[int, ...]] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._peers: dict[socket.socket, _Peer] = {}
        self._listener: socket.socket | None = None
        self._token = ""

    def listen(self, *, everywhere: bool) -> dict[str, Any]:
        """Makes rank 0 listen.

        Args:
            everywhere: bool, whether ranks of other hosts must reach it; otherwise it listens on loopback alone.

        Returns:
            What the other ranks need: `hosts`, `port`, and a `token` that only ranks of this job know.
        """
        self._listener = socket.create_server(("" if everywhere else "127.0.0.1", 0), backlog=self._size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_hex(16)
        hosts = _own_hosts() if everywhere else ["127.0.0.1"]
        return {"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token}

    def connect(self, address: dict[str, Any], timeout: float = 20.0) -> None:
        """Makes another rank find rank 0.

        Args:
            address: what `listen` returned there.
            timeout: float, seconds.

        Raises:
            OSError: if rank 0 cannot be reached.
        """
        *others, last = address["hosts"]
        share = timeout / len(address["hosts"])
        for host in others:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, address["port"]), share)
                break
        else:
            connection = socket.create_connection((last, address["port"]), share)
        peer = self._add(connection, rank=0)
        peer.put({"token": address["token"], "rank": self._rank})

    def start(self) -> None:
        """Begins to watch. The thread does not keep the process from ending."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="kdist-watch", daemon=True).start()

    def finish(self) -> None:
        """Tells the others that this rank's script is through."""
        self._activity.has_ended = True
        self._wake.send(b".")

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(64)
                    due = 0.0
                else:
                    self._read(self._peers[key.fileobj])  # type: ignore[index]
            if time.monotonic() >= due:
                due = time.monotonic() + _PERIOD
                self._beat()

    def _accept(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._add(self._listener.accept()[0], rank=None)

    def _add(self, connection: socket.socket, rank: int | None) -> _Peer:
        connection.setblocking(False)
        peer = self._peers[connection] = _Peer(connection, rank)
        self._selector.register(connection, selectors.EVENT_READ)
        return peer

    def _read(self, peer: _Peer) -> None:
        for message in peer.take():
            if peer.rank is None:
                rank, token = message.get("rank"), str(message.get("token"))
                known = isinstance(rank, int) and 0 < rank < self._size and hmac.compare_digest(token, self._token)
                peer.rank, peer.is_closed = (rank, False) if known else (None, True)
            elif "end" in message:
                time.sleep(_HEAD_START)
                self._end("")
            else:
                peer.report = message
        if peer.is_closed:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.rank is None:
                del self._peers[peer.connection]

    def _beat(self) -> None:
        mine = self._activity.report()
        for peer in self._peers.values():
            # To rank 0 what this rank does; from it a mere sign of life.
            peer.put(mine if self._rank else {"ended": mine["ended"]})
        own = _sign(self._rank, mine, 0.0, gone=False)
        verdict = judge(
            [own, *(peer.sign() for peer in self._peers.values() if peer.rank is not None)],
            self.stall_timeout,
            is_strict=self.is_strict,
        )
        if verdict is not None:
            self._act(verdict)

    def _act(self, verdict: Verdict) -> None:
        if not verdict.is_fatal:
            if verdict.ranks not in self._warned and self._rank == 0:
                self._warned.add(verdict.ranks)
                self._warn(verdict.text)
            return
        if self._rank:
            time.sleep(_HEAD_START * min(self._rank - 1, 3))  # rank 0 is to blame: the next one has the word
        for peer in self._peers.values():
            peer.put({"end": True})
        self._end(verdict.text)


def _own_hosts() -> list[str]:
    """Returns the addresses under which other hosts may reach this one, the likeliest first."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent: it only tells by which interface one would leave
        found.append(probe.getsockname()[0])
    # A network of compute nodes often leads nowhere else: there is no way out to ask for.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24]))
    # Debian's own entry for a host's name is a loopback address.
    with contextlib.suppress(OSError):
        found += [each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return [*dict.fromkeys(host for host in found if not host.startswith("127.")), socket.gethostname()]


class _Peer:
    """One connection."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        self.connection = connection
        self.rank = rank
        self.report: dict[str, Any] = {}
        self.is_closed = False
        self._heard = time.monotonic()
        self._in, self._out = b"", b""

    def put(self, message: dict[str, Any]) -> None:
        """Sends a message, unless the last one has not left yet: the peer does not read, and need not read twice."""
        if self.is_closed:
            return
        if not self._out:
            self._out = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):  # full, or closed, which reading tells
            self._out = self._out[self.connection.send(self._out) :]

    def take(self) -> list[dict[str, Any]]:
        """Returns what has arrived."""
        try:
            received = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        self.is_closed = not received
        self._heard = time.monotonic()
        *lines, self._in = (self._in + received).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._in) > _LONGEST or not all(isinstance(message, dict) for message in messages):
            self.is_closed = True  # not one of ours
            return []
        return messages

    def sign(self) -> Sign:
        """Returns what is known of this rank."""
        return _sign(self.rank or 0, self.report, time.monotonic() - self._heard, gone=self.is_closed)


def _sign(rank: int, report: dict[str, Any], silent: float, *, gone: bool) -> Sign:
    known = {field.name: report[field.name] for field in dataclasses.fields(Sign) if field.name in report}
    known.update({name: tuple(places) for name, places in known.items() if isinstance(places, list)})
    return Sign(**{**known, "rank": rank, "silent": silent, "gone": gone})
