"""Connecting to a TPU within a time limit; the strategy is TensorFlow's own."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import tensorflow as tf

from kdist.errors import StrategyError


def tpu_strategy(resolver: str | tf.distribute.cluster_resolver.TPUClusterResolver, seconds: float) -> Any:
    """Connects to a TPU, initialises its system and returns the strategy that trains on it.

    TensorFlow's functions for it have no time limit, so they run in a thread, which is abandoned at the limit.

    Args:
        resolver: str, the TPU's name, its address (`"grpc://host:port"`) or `"local"`; or a `TPUClusterResolver`.
        seconds: float, how long all of it may take.

    Returns:
        A `tf.distribute.TPUStrategy`.

    Raises:
        StrategyError: if no TPU is reached; it names the stage that failed.
    """
    attempt = _Attempt(resolver, seconds)
    thread = threading.Thread(target=attempt.run, name="kdist-tpu", daemon=True)
    thread.start()
    thread.join(seconds)
    if attempt.strategy is not None:
        return attempt.strategy
    name = resolver if isinstance(resolver, str) else resolver.master() or "local"
    error = attempt.error
    received = f"no answer within {seconds:g} s" if error is None else f"{type(error).__name__}: {_first_line(error)}"
    raise StrategyError(
        f"The TPU cannot be reached. Received while {attempt.stage}: {received}. Expected a TPU named {name!r}. Fix: "
        "check that name (TPU_NAME, or kdist.TPU(resolver=...)), that the TPU runs and that this machine is in its "
        'network and zone; on a TPU VM it is "local". To train without: strategy="single".'
    ) from error


@dataclasses.dataclass
class _Attempt:
    """One attempt to connect to a TPU, and its current stage."""

    resolver: Any
    seconds: float
    stage: str = "beginning"
    strategy: Any = None
    error: Exception | None = None

    def run(self) -> None:
        try:
            resolver = self.resolver
            if isinstance(resolver, str):
                self.stage = f"looking up the TPU {resolver!r}"
                resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=resolver)
            self.stage = f"connecting to {resolver.master() or 'the TPU of this host'}"
            _check_port(resolver.master(), self.seconds)
            tf.config.experimental_connect_to_cluster(resolver)
            self.stage = "initialising the TPU system"
            tf.tpu.experimental.initialize_tpu_system(resolver)
            self.stage = "making the strategy"
            self.strategy = tf.distribute.TPUStrategy(resolver)
        except Exception as error:  # whatever it is, the caller's thread raises it
            self.error = error


def _check_port(master: str, seconds: float) -> None:
    """Raises `OSError` if nothing listens at an address: TensorFlow would wait for it while it holds Python's lock."""
    host, _, port = master.removeprefix("grpc://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
