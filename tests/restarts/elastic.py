"""A training that loses a host, and gets it back: `python -m tests.restarts.elastic FOLDER`, on simulated hosts.

The first start stops a host, the second one starts it again. The last one trains a second time as well, without an
interruption: the chief keeps what came of both.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras

import kdist
from tests.restarts.resized import keep, train
from tests.restarts.simulated_hosts import SimulatedHosts

HOST = "beta"  # the one that is lost
STEP = 4  # of the first start, in which that is
PAUSE = 0.5  # seconds after each step of the second one, in which `kdist run` finds that the host is back


class Loss(keras.callbacks.Callback):
    """Stops the host in a step.

    Args:
        hosts: `SimulatedHosts`.
    """

    def __init__(self, hosts: SimulatedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it, if this is the chief and the step."""
        if batch == STEP and kdist.is_chief():
            self._hosts.stop(HOST)


class Return(keras.callbacks.Callback):
    """Starts the host again, and leaves time to find it.

    Args:
        hosts: `SimulatedHosts`.
    """

    def __init__(self, hosts: SimulatedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts it."""
        self._hosts.start(HOST)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Waits."""
        time.sleep(PAUSE)


def main() -> None:
    """Trains to the end, if nothing comes between."""
    folder = Path(sys.argv[1])
    hosts = SimulatedHosts(folder)
    keras.backend.set_floatx("float64")
    starts = folder / "starts"
    with kdist.chief_first():
        number = len(starts.read_text()) if starts.exists() else 0
    kdist.barrier()
    if kdist.is_chief():
        starts.write_text("." * (number + 1))
    events = [[Loss(hosts)], [Return(hosts)], []][number]
    keep(folder / "arrays-resized.npz", train("arrays", folder / "backup", [*events, kdist.callbacks.Preemption()]))
    keep(folder / "arrays-whole.npz", train("arrays", folder / "unused", []))


if __name__ == "__main__":
    main()
