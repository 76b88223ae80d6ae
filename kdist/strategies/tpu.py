"""TPUs: connecting to them within a time limit; the strategy is TensorFlow's own."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import tensorflow as tf

from kdist.errors import StrategyError


def tpu_strategy(resolver: str | tf.distribute.cluster_resolver.TPUClusterResolver, seconds: float) -> Any:
    """Connects to a TPU, initialises its system and returns the strategy that trains on it.

    What TensorFlow calls for it waits for ever where nobody answers, so it runs in a thread that is left behind.

    Args:
        resolver: str, the TPU's name, its address (`"grpc://host:port"`) or `"local"`; or a `TPUClusterResolver`.
        seconds: float, how long all of it may take.

    Returns:
        A `tf.distribute.TPUStrategy`.

    Raises:
        StrategyError: if no TPU is reached, naming what was tried.
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
        f"No TPU was reached. Received while {attempt.stage}: {received}. Expected a TPU named {name!r}. Fix: check "
        "that name (TPU_NAME, or kdist.TPU(resolver=...)), that the TPU runs and that this machine is in its network "
        'and zone; on a TPU VM it is "local". To train without: strategy="single".'
    ) from error


@dataclasses.dataclass
class _Attempt:
    """One attempt to reach a TPU, and how far it came."""

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
            _knock(resolver.master(), self.seconds)
            tf.config.experimental_connect_to_cluster(resolver)
            self.stage = "initialising the TPU system"
            tf.tpu.experimental.initialize_tpu_system(resolver)
            self.stage = "making the strategy"
            self.strategy = tf.distribute.TPUStrategy(resolver)
        except Exception as error:  # whatever it is, it is told in the caller's thread
            self.error = error


def _knock(master: str, seconds: float) -> None:
    """Raises `OSError` if nobody answers at an address: TensorFlow would wait for it without letting go of Python."""
    host, _, port = master.removeprefix("grpc://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
