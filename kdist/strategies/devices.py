"""One process, its devices: a GPU by local rank, and a fair share of the host's cores."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.errors import ScopeError

logger = logging.getLogger("kdist")


def take_devices(local_rank: int, local_size: int, env: Mapping[str, str]) -> None:
    """Gives this process its GPU and its share of the cores, before TensorFlow touches them.

    What the user or the launcher has set is respected: one visible GPU is taken as it is, and so are thread pools.

    Args:
        local_rank: int, this process's number on its host.
        local_size: int, the number of processes on this host.
        env: mapping of environment variables.

    Raises:
        ScopeError: if TensorFlow has already initialised the GPUs.
    """
    if local_size > 1:
        _take_gpu(local_rank, local_size)
        _take_threads(local_size, env)


def _take_gpu(local_rank: int, local_size: int) -> None:
    visible = tf.config.get_visible_devices("GPU")
    num_gpus = len(visible)
    if not visible:
        return
    try:
        if len(visible) > 1:
            visible = [share(visible, local_rank)]
            tf.config.set_visible_devices(visible, "GPU")
        for gpu in visible:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise ScopeError(
            "TensorFlow has initialised its devices before kdist.scope() could choose a GPU for local rank "
            f"{local_rank}. Received: {error} Expected nothing on a device before kdist is first asked, which is in "
            f"{_line_of_the_script()}. Fix: move that line up, above the first that makes a tensor, a layer or a model."
        ) from error
    if local_size > num_gpus > 1:
        logger.warning("%d ranks share %d GPUs of this host", local_size, num_gpus)


def _line_of_the_script() -> str:
    """Returns the innermost line of the stack that is neither kdist's nor Python's own."""
    libraries = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__), "<")
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(libraries)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "a line that cannot be told"


def share(devices: Sequence[Any], local_rank: int) -> Any:
    """Returns the device of a local rank, of those that its host's ranks share: each in turn."""
    return devices[local_rank % len(devices)]


def threads_per_rank(affinity: int, num_cpus: int, local_size: int) -> int:
    """Returns how many threads a rank may run.

    Args:
        affinity: int, the CPUs that this process may run on.
        num_cpus: int, the CPUs of the host.
        local_size: int, the ranks on the host.

    Returns:
        The CPUs of its affinity mask, divided by the ranks that share the mask; at least 1.
    """
    sharing = max(1, -(-local_size * affinity // num_cpus))
    return max(1, affinity // sharing)


def _take_threads(local_size: int, env: Mapping[str, str]) -> None:
    affinity, num_cpus = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if affinity == 1 and num_cpus // local_size > 1:
        logger.warning(
            "this rank is bound to one core of %d, shared by all of TensorFlow's threads. Fix: "
            "`mpirun --bind-to none`, or `kdist run`, which does so.",
            num_cpus,
        )
    threads = threads_per_rank(affinity, num_cpus, local_size)
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads() and "TF_NUM_INTRAOP_THREADS" not in env:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        if not tf.config.threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in env:
            # One more than the computing ones: a thread that waits for the other ranks must not stop the input. On one
            # core it would only take turns with the others, which costs a tenth of a short step.
            tf.config.threading.set_inter_op_parallelism_threads(threads + 1 if threads > 1 else 1)
    except RuntimeError:
        logger.info("TensorFlow was used before kdist.scope(): its thread pools stay as they are")
