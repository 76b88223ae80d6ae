"""The program of each rank of `kdist check`: ranks, speed of an all-reduce, and whether N ranks train as one."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kdist
from kdist._engine import open_engine
from kdist.cli.quiet_import import import_keras_quietly
from kdist.engines.engine import Engine
from kdist.reports.scope_marks import own_scopes

if TYPE_CHECKING:
    import keras

_SMALL, _LARGE = 1 << 10, 16 << 20  # bytes of an all-reduce
_BYTES_OF_A_MODEL = 4 * 10_000_000
_SLOW_LATENCY, _SLOW_BANDWIDTH = 2e-3, 100e6  # seconds, bytes a second: as over a busy network of 1 Gb/s
_BATCH = 8  # rows of a replica's batch
_STEPS = 2
_TOLERANCE = 1e-5  # relative to the largest entry of a variable, in float32


def main() -> int:
    """Runs the smoke test on this rank.

    Collective: every rank must call this, in the same order.

    Returns:
        0 if the ranks trained as one process does, else 1.
    """
    import_keras_quietly()
    with kdist.scope(scale_lr=None):
        engine = open_engine(kdist.cluster_info())
        _report_ranks(engine)
        _report_allreduce(engine)
        distributed = _trained_weights(_BATCH)
    own_scopes.mark_alone()  # each rank trains as one process would
    single = _trained_weights(_BATCH * kdist.size())
    difference = max(_difference(a, b) for a, b in zip(distributed, single, strict=True))
    worst = max(engine.gather_objects(difference))
    # A NaN fails this comparison.
    is_same = worst <= _TOLERANCE
    _print(
        f"fit         {_STEPS} steps on {kdist.size()} rank(s) against one process: weights differ by {worst:.1e} of "
        f"the largest entry, {'within' if is_same else 'MORE THAN'} {_TOLERANCE:.0e}"
    )
    return 0 if is_same else 1


def _report_ranks(engine: Engine) -> None:
    import tensorflow as tf

    devices = [device.name.removeprefix("/physical_device:") for device in tf.config.get_visible_devices()]
    for rank, (host, names) in enumerate(engine.gather_objects([platform.node(), devices])):
        _print(f"rank {rank:<6} host {host}, devices {', '.join(names)}")


def _report_allreduce(engine: Engine) -> None:
    latency = _allreduce_seconds(engine, _SMALL, repeats=100)
    bandwidth = _LARGE / _allreduce_seconds(engine, _LARGE, repeats=5)
    _print(
        f"all-reduce  {engine.name}: {1e6 * latency:.0f} µs for {_SMALL >> 10} KB, "
        f"{bandwidth / 1e9:.2f} GB/s for {_LARGE >> 20} MB; {judgement(latency, bandwidth)}"
    )


def judgement(latency: float, bandwidth: float) -> str:
    """Returns what the speed of messages means for training, and what to do if it is low.

    Args:
        latency: float, seconds of a small all-reduce.
        bandwidth: float, bytes a second of a large one.
    """
    seconds = latency + _BYTES_OF_A_MODEL / bandwidth
    text = f"a step of a model of 10 million weights sends for {1e3 * seconds:.0f} ms"
    if latency < _SLOW_LATENCY and bandwidth > _SLOW_BANDWIDTH:
        return text
    return f"{text}: SLOW. Fix: idle cores for each rank, and the fast network (docs/networks.md)"


def _allreduce_seconds(engine: Engine, size: int, repeats: int) -> float:
    """Returns the median time of an all-reduce of `size` bytes, after checking its sum."""
    import tensorflow as tf

    ones = tf.ones([size // 4])
    engine.allreduce([ones])
    seconds = []
    for _ in range(repeats):
        engine.barrier()
        start = time.perf_counter()
        [total] = engine.allreduce([ones])
        seconds.append(time.perf_counter() - start)
        if not np.all(np.asarray(total) == engine.size):
            sys.exit(f"an all-reduce of ones returned {np.unique(np.asarray(total))}, not {engine.size}")
    return statistics.median(seconds)


def _trained_weights(batch_size: int) -> list[Any]:
    """Trains a small model, the same for any number of ranks, and returns its weights."""
    rows = _BATCH * _STEPS * kdist.size()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, 5)).astype("float32"), random.normal(size=(rows, 2)).astype("float32")
    model = _model()
    model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


def _model() -> keras.Model:
    import keras

    def initializer(seed: int) -> Any:
        return keras.initializers.GlorotUniform(seed)

    model = keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(7, activation="tanh", kernel_initializer=initializer(1)),
            keras.layers.Dense(2, kernel_initializer=initializer(2)),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    return model


def _difference(a: Any, b: Any) -> float:
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-6))


def _print(text: str) -> None:
    if kdist.is_chief():
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
