"""The start of TensorFlow's cluster: each task starts its server, and waits for those of all others."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist._tf_internals import is_initialized, start_collective_server
from kdist.cluster.connections import host_and_port
from kdist.errors import EngineError

_LOG = logging.getLogger("kdist")

JOB = "worker"
"""The name of the cluster's only job; its tasks are numbered by rank."""

_WAIT_IS_LONG = 10.0  # seconds after which a rank logs for which ranks it waits
_PAUSE = 0.2  # seconds between two attempts to connect to a rank
_MAX_FAILURES = 5  # attempts to connect to a rank that was reached before

# A host that is switched off does not close its connections: TCP probes it every 10 s.
_KEEP_ALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)


def start(addresses: Sequence[str], rank: int) -> None:
    """Starts this rank's server.

    Args:
        addresses: sequence of `"host:port"`, in rank order.
        rank: int, this process's number.

    Raises:
        EngineError: if the server cannot be started, or if what TensorFlow made before would be lost.
    """
    if is_initialized():
        _check_nothing_is_lost(rank, len(addresses))
    cluster = tf.train.ClusterSpec({JOB: list(addresses)}).as_cluster_def()
    server = tf.train.ServerDef(cluster=cluster, job_name=JOB, task_index=rank, protocol="grpc")
    try:
        start_collective_server(server, f"/job:{JOB}/replica:0/task:0")
    except tf.errors.OpError as error:
        raise EngineError(
            f"TensorFlow's server does not start on rank {rank} of {len(addresses)}. Received for "
            f"{addresses[rank]}: {error.message}. Expected a port of this host that no other process uses. Fix: give "
            "each task a free port of its own host in TF_CONFIG, and end what is left of an earlier job."
        ) from error


def wait_for_all(addresses: Sequence[str], rank: int, seconds: float) -> None:
    """Returns when every rank's server can be reached.

    Args:
        addresses: sequence of `"host:port"`, in rank order.
        rank: int, this process's number.
        seconds: float, how long to wait.

    Raises:
        EngineError: if a rank does not start in time.
    """
    missing = {each: "" for each in range(len(addresses)) if each != rank}
    started, is_logged = time.monotonic(), False
    while True:
        for each in list(missing):
            missing[each] = _connection_error(addresses[each])
            if not missing[each]:
                del missing[each]
        waited = time.monotonic() - started
        if not missing:
            return
        names = ", ".join(f"rank {each} at {addresses[each]} ({why})" for each, why in missing.items())
        if waited > seconds:
            raise EngineError(
                f"Not all ranks started within {seconds:g} s. Received on rank {rank} of {len(addresses)}: nothing "
                f"from {names}. Expected a process at each address. Fix: start these processes, correct their "
                "addresses in TF_CONFIG, open their ports between the hosts, or wait longer: "
                'kdist.scope(kdist.AllReduce("collective", start_timeout=...)).'
            )
        if waited > _WAIT_IS_LONG and not is_logged:
            is_logged = True
            _LOG.warning("rank %d of %d waits for %s", rank, len(addresses), names)
        time.sleep(_PAUSE)


def watch(address: str, on_end: Callable[[], None]) -> None:
    """Calls `on_end` when no process listens at an address any more: TensorFlow may wait forever for a dead process.

    It runs in a thread of its own, and relies on the system, which closes a process's connections when it ends.
    """
    threading.Thread(target=_watch, args=(address, on_end), name="kdist-peer", daemon=True).start()


def _watch(address: str, on_end: Callable[[], None]) -> None:
    failures = 0
    while failures < _MAX_FAILURES:
        try:
            with contextlib.closing(_connect(address)) as connection:
                failures = 0
                for option, value in _KEEP_ALIVE:
                    connection.setsockopt(*option, value)
                connection.settimeout(None)
                with contextlib.suppress(OSError):
                    # The server sends a greeting, and closes an idle connection after minutes.
                    while connection.recv(1 << 12):
                        pass
        except ConnectionRefusedError:
            break
        except OSError:
            failures += 1
        time.sleep(_PAUSE)
    on_end()


def unreachable(addresses: Sequence[str], rank: int, seconds: float = 0.0) -> list[int]:
    """Returns the ranks whose addresses cannot be connected to, as soon as there are some, or after some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = [each for each, address in enumerate(addresses) if each != rank and _connection_error(address)]
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE)


def host(address: str) -> str:
    """Returns the host of `"host:port"`."""
    return address.rpartition(":")[0]


def _connect(address: str) -> socket.socket:
    return socket.create_connection(host_and_port(address), timeout=2.0)


def _connection_error(address: str) -> str:
    """Returns why an address cannot be connected to, or an empty string."""
    try:
        with contextlib.closing(_connect(address)):
            return ""
    except OSError as error:
        return str(error)


def _check_nothing_is_lost(rank: int, size: int) -> None:
    """Refuses to start where resources exist: they would not exist on the cluster's devices, which have other names."""
    kinds = (tf.Variable, tf.data.Iterator, tf.saved_model.experimental.TrackableResource)
    # By type(), because isinstance() of a lazy proxy may import its module.
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    if found:
        counted = collections.Counter(type(each).__name__ for each in found)
        names = ", ".join(f"{count} {name}" for name, count in counted.items())
        raise EngineError(
            f"TensorFlow was used before its cluster was started, on rank {rank} of {size}. Received: {names}, made "
            "earlier, which would be lost. Expected kdist.scope() before anything that makes variables, iterators or "
            "tables. Fix: move the lines that make layers, models and iterators into `with kdist.scope():`, or enter "
            "it before them; or start the script by mpirun, where this does not matter."
        )
