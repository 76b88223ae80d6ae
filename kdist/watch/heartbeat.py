"""Heartbeats over TCP, beside the collectives: each rank sends its report to rank 0, which detects failures."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from kdist.cluster.connections import connect, listen, own_hosts
from kdist.cluster.forked_child import call_in_forked_children
from kdist.restarts.events import Kind, own_reports
from kdist.watch.activity import Activity
from kdist.watch.failure_detector import Failure, RankReport, StallTimeout, detect_failure

MAX_MESSAGE_BYTES = 1 << 16
_PERIOD = 1.0  # seconds between two heartbeats
_STOPPED = 5.0  # seconds too late, after which this process was stopped, as by SIGSTOP, and is not only slow
_ROOT_FIRST = 3.0  # seconds that rank 0 has to end the job before another rank does


class Heartbeat:
    """Sends this rank's heartbeats and checks those of the others, in a thread of its own.

    Args:
        activity: `Activity`, what this rank does.
        rank: int, this process's number.
        size: int, the number of ranks.
        fail: function of a message that reports it and ends the job; the message is empty where another rank reports.
        warn: function of a message that logs it.

    Attributes:
        stall_timeout: `StallTimeout`.
        has_lost: `None`, or a function that returns whether ranks are known to be gone, and the others go on: a
            connection that has closed ends the job only if they are not.
    """

    has_lost: Callable[[], bool] | None = None

    def __init__(
        self, activity: Activity, rank: int, size: int, fail: Callable[[str], Any], warn: Callable[[str], Any]
    ) -> None:
        self.stall_timeout = StallTimeout()
        self._activity = activity
        self._rank = rank
        self._size = size
        self._fail = fail
        self._warn = warn
        self._warned: set[tuple[int, ...]] = set()
        self._warned_stacks = ""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._peers: dict[socket.socket, _Peer] = {}
        self._listener: socket.socket | None = None
        self._token = ""
        self._reporter: dict[str, int] = {}  # on rank 0: the rank that asked first to report a failure
        self._asks = False  # whether this rank asks to report one
        self._is_reporter = True
        self._answered = threading.Event()
        self._due = 0.0
        self._woke = time.monotonic()  # when it last stopped waiting for messages
        self._has_raised = False
        self._is_paused = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def listen(self, *, everywhere: bool) -> dict[str, Any]:
        """Opens the port of rank 0.

        Args:
            everywhere: bool, whether ranks of other hosts connect; otherwise it listens on loopback only.

        Returns:
            What the other ranks need to connect: `hosts`, `port`, and a `token` that only ranks of this job know.
        """
        self._listener = listen("" if everywhere else "127.0.0.1", 0, self._size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_hex(16)
        hosts = own_hosts() if everywhere else ["127.0.0.1"]
        return {"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token}

    def connect(self, address: dict[str, Any], timeout: float = 20.0) -> None:
        """Connects another rank to rank 0.

        Args:
            address: dict, what `listen` returned on rank 0.
            timeout: float, seconds.

        Raises:
            OSError: if rank 0 cannot be reached.
        """
        connection = connect(address["hosts"], address["port"], timeout)
        peer = self._add(connection, rank=0)
        peer.send({"token": address["token"], "rank": self._rank})

    def start(self) -> None:
        """Starts the thread, a daemon, which does not keep the process from exiting."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        call_in_forked_children(self._close_copies)
        self._thread = threading.Thread(target=self._run, name="kdist-heartbeat", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Reports that this rank's script has finished."""
        self._activity.has_finished = True
        self._wake.send(b".")

    def pause(self) -> None:
        """Detects nothing from now on: ranks that are left leave their collectives, each in its time."""
        self._is_paused = True

    def close(self) -> None:
        """Ends the thread, and closes all connections."""
        if self._is_closed:
            return
        self._is_paused = self._is_closed = True
        self._wake.send(b".")
        if self._thread is not None:
            self._thread.join(_PERIOD * 10)
        for each in (self._listener, *self._peers, self._wake, self._woken):
            if each is not None:
                each.close()
        self._selector.close()

    def _close_copies(self) -> None:
        """Closes a child's copies of the connections: the other ranks see this one's end although the child lives."""
        for each in (self._listener, *self._peers):
            if each is not None:
                each.close()

    def may_report(self, timeout: float = 1.0) -> bool:
        """Returns whether this rank is the first that asks: of several ranks that fail at once, one reports it.

        Args:
            timeout: float, seconds. Without an answer of rank 0 by then, this rank may.
        """
        self._asks = True
        with contextlib.suppress(OSError):  # closed, where ranks go on without those that are gone
            self._wake.send(b".")
        if self._rank == 0:
            return self._reporter.setdefault("rank", 0) == 0
        self._answered.wait(timeout)
        return self._is_reporter

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._listen_and_beat()
            except Exception as error:  # without this thread nothing would detect dead or stalled ranks
                is_first, self._has_raised = not self._has_raised, True
                if is_first and not self._activity.has_finished:
                    text = "".join(traceback.format_exception(error)).rstrip()
                    with contextlib.suppress(RuntimeError):  # no more threads
                        self._warn_aside(f"a heartbeat of rank {self._rank} failed; the next ones are tried:\n{text}")
                time.sleep(_PERIOD)

    def _warn_aside(self, text: str) -> None:
        """Warns in a thread of its own: a terminal that is stopped, as by Ctrl-S, blocks whoever writes to it."""
        threading.Thread(target=self._warn, args=(text,), name="kdist-warning", daemon=True).start()

    def _listen_and_beat(self) -> None:
        """Waits for messages until the next heartbeat is due, and sends it then."""
        events = self._selector.select(max(0.0, self._due - time.monotonic()))
        before, self._woke = self._woke, time.monotonic()
        late = self._woke - before - _PERIOD
        if late > _STOPPED:  # the others were not silent: who suspends a job stops all of its ranks
            self._activity.exclude_stopped_time(late)
            for peer in self._peers.values():
                peer.exclude_stopped_time(late)
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(64)
                self._due = 0.0
            else:
                self._read(self._peers[key.fileobj])  # type: ignore[index]
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PERIOD
            self._beat()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:  # as where the process has no file descriptor left: the connection waits
            time.sleep(_PERIOD / 10)
            return
        self._add(connection, rank=None)

    def _add(self, connection: socket.socket, rank: int | None) -> _Peer:
        connection.setblocking(False)
        peer = self._peers[connection] = _Peer(connection, rank)
        self._selector.register(connection, selectors.EVENT_READ)
        return peer

    def _read(self, peer: _Peer) -> None:
        for message in peer.receive():
            if peer.rank is None:
                rank, token = message.get("rank"), str(message.get("token")).encode(errors="replace")
                is_rank = isinstance(rank, int) and 0 < rank < self._size
                known = is_rank and hmac.compare_digest(token, self._token.encode())
                peer.rank, peer.is_closed = (rank, False) if known else (None, True)
            elif "failed" in message:
                time.sleep(_ROOT_FIRST)
                self._fail("")
            elif "is_reporter" in message:
                self._is_reporter = message["is_reporter"]
                self._answered.set()
            else:
                peer.last_report = message
                if message.get("has_failed"):
                    peer.send({"is_reporter": self._reporter.setdefault("rank", peer.rank) == peer.rank})
        if peer.is_closed:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.rank is None:
                del self._peers[peer.connection]

    def _beat(self) -> None:
        mine = {**self._activity.report(), "has_failed": self._asks, "is_healing": self._is_paused}
        own_reports.record_place(mine["place"])
        for peer in self._peers.values():
            # Rank 0 gets the whole report; the others need a heartbeat of rank 0, and whether they wait for it in vain.
            peer.send(
                mine if self._rank else {name: mine[name] for name in ("finished", "calls", "has_failed", "is_healing")}
            )
        reports = [_rank_report(self._rank, mine)]
        reports += [peer.report() for peer in self._peers.values() if peer.rank is not None]
        reports.sort(key=lambda each: each.rank)
        if self._is_paused:
            return
        failure = detect_failure(reports, self.stall_timeout)
        if failure is not None and self._is_healed(failure):
            others = [each for each in reports if each.rank not in failure.ranks and not each.is_healing]
            failure = detect_failure(others, self.stall_timeout)
        if failure is None:
            self._warned.clear()  # the next stall of a rank is told of, too
        elif time.monotonic() - self._woke < _STOPPED:  # else it was stopped just now, in the midst of this
            self._handle(failure)

    def _is_healed(self, failure: Failure) -> bool:
        """Returns whether the others go on without the ranks that are gone, as they learn in their next collective."""
        return failure.kind is Kind.LOST and self.has_lost is not None and self.has_lost()

    def _handle(self, failure: Failure) -> None:
        if not failure.is_fatal:
            if failure.ranks not in self._warned and self._rank == 0:
                self._warned.add(failure.ranks)
                self._warned_stacks = failure.stacks
                self._warn_aside(failure.text + failure.stacks)
            return
        if self._rank:
            time.sleep(_ROOT_FIRST * min(self._rank - 1, 3))  # rank 0 has failed: the lowest other rank reports it
        for peer in self._peers.values():
            peer.send({"failed": True})
        own_reports.failed(failure.kind, failure.text, None if failure.is_of_all else failure.ranks[0])
        is_shown = failure.stacks and failure.stacks == self._warned_stacks
        self._fail(failure.text + ("\n  The stacks are those of the warning above." if is_shown else failure.stacks))


class _Peer:
    """A connection to another rank."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        self.connection = connection
        self.rank = rank
        self.last_report: dict[str, Any] = {}
        self.is_closed = False
        self._last_received = time.monotonic()
        self._in, self._out = b"", b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, or drops it while the last one is still in the buffer."""
        if self.is_closed:
            return
        if not self._out:
            self._out = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):  # full, or closed, which `receive` detects
            self._out = self._out[self.connection.send(self._out) :]

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived."""
        try:
            received = self.connection.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        self.is_closed = not received
        self._last_received = time.monotonic()
        *lines, self._in = (self._in + received).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._in) > MAX_MESSAGE_BYTES or not all(isinstance(message, dict) for message in messages):
            self.is_closed = True  # not a rank of this job
            return []
        return messages

    def exclude_stopped_time(self, seconds: float) -> None:
        """Leaves out of the time since the last heartbeat what passed while this process was stopped."""
        self._last_received = min(self._last_received + seconds, time.monotonic())

    def report(self) -> RankReport:
        """Returns what is known of the rank."""
        age = time.monotonic() - self._last_received
        return _rank_report(self.rank or 0, self.last_report, age, disconnected=self.is_closed)


def _rank_report(
    rank: int, report: dict[str, Any], heartbeat_age: float = 0.0, *, disconnected: bool = False
) -> RankReport:
    known = {field.name: report[field.name] for field in dataclasses.fields(RankReport) if field.name in report}
    known.update({name: tuple(places) for name, places in known.items() if isinstance(places, list)})
    return RankReport(**{**known, "rank": rank, "heartbeat_age": heartbeat_age, "disconnected": disconnected})
