"""The program of each rank that tests an installed Horovod: one all-reduce."""

from __future__ import annotations

import sys

import tensorflow as tf

from kdist.engines.horovod import HorovodEngine


def main() -> int:
    """Sums a tensor over the ranks and checks the result.

    Collective: every rank must call this, in the same order.

    Returns:
        0 if the sum is right and there are several ranks, else 1.
    """
    engine = HorovodEngine()
    with tf.device("CPU:0"):  # both ranks may share one GPU
        [total] = engine.allreduce([tf.fill([1000], engine.rank + 1.0)])
    is_right = engine.size > 1 and bool(tf.reduce_all(total == engine.size * (engine.size + 1) / 2))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
