"""Standby: the ranks of a job that has not begun have imported Keras, and wait until `kdist run` lets them begin."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator

from kdist.cluster.connections import connect, keep_alive, listen, own_hosts

# What a script imports: Keras with its backend, and what a scope of several ranks needs of kdist.
_IMPORTED = ("keras", "kdist._scope", "kdist.callbacks", "kdist.trainer.replicated_model")
_BEGIN = b"b"
_TOKEN_TIMEOUT = 2.0  # seconds in which what has connected must send the token


class Standby:
    """What `kdist run` holds of ranks that wait.

    Args:
        everywhere: bool, whether ranks of other hosts connect; otherwise it listens on loopback only.

    Attributes:
        address: str, where a rank connects, and with what it begins: `HOST,HOST,...:PORT:TOKEN`.
    """

    def __init__(self, *, everywhere: bool) -> None:
        self._listener = listen("" if everywhere else "127.0.0.1", 0, 128)
        hosts = own_hosts() if everywhere else ["127.0.0.1"]
        self._token = secrets.token_hex(8)
        self.address = f"{','.join(hosts)}:{self._listener.getsockname()[1]}:{self._token}"
        self._lock = threading.Lock()
        self._waiting: list[socket.socket] = []
        self._has_begun = False
        self._is_closed = False
        threading.Thread(target=self._accept, name="kdist-standby", daemon=True).start()

    @property
    def has_lost(self) -> bool:
        """Whether a rank that was ready has gone."""
        with self._lock:
            return any(map(_has_ended, self._waiting))

    def begin(self) -> None:
        """Lets all ranks begin, those that come later at once."""
        with self._lock:
            self._has_begun = True
            for connection in self._waiting:
                _send_begin(connection)

    def close(self) -> None:
        """Ends the ranks that wait."""
        self._is_closed = True
        with self._lock:
            waiting = list(self._waiting)
        for each in (self._listener, *waiting):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends the `accept` of the thread, too
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # too many open files, say
                continue
            if not self._is_rank(connection):
                connection.close()
                continue
            with self._lock:
                self._waiting.append(connection)
                if self._has_begun:
                    _send_begin(connection)

    def _is_rank(self, connection: socket.socket) -> bool:
        """Returns whether what has connected is a rank of this job, which knows the token."""
        connection.settimeout(_TOKEN_TIMEOUT)
        try:
            said = connection.recv(2 * len(self._token)).decode(errors="replace")
        except OSError:
            return False
        connection.settimeout(None)
        return secrets.compare_digest(said.encode(), self._token.encode())


def wait(address: str) -> None:
    """Imports what a script will need, and returns when the job begins; ends this process if it never does.

    What it prints until then is dropped: the terminal shows the output of the job that runs now.

    Args:
        address: str, that of `Standby`.

    Raises:
        OSError: if `kdist run` cannot be reached.
    """
    with _silence():
        for name in _IMPORTED:
            # What fails here fails in the script again, which says so.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    hosts, port, token = address.rsplit(":", 2)
    with connect(hosts.split(","), int(port)) as connection:
        keep_alive(connection)
        connection.sendall(token.encode())
        with contextlib.suppress(OSError):
            if connection.recv(1) == _BEGIN:
                return
    os._exit(1)  # so that the launcher ends the others


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send_begin(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a rank that has gone, which its launcher reports
        connection.sendall(_BEGIN)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drops what is written to the standard streams, by C++ too."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
            os.close(old)
        os.close(nothing)
