"""The devices of a process: a GPU by local rank, and its share of the host's cores."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist._user_code import user_line
from kdist.errors import ScopeError

logger = logging.getLogger("kdist")

# By which a launcher or a user chooses the GPUs of a process.
_CHOICES = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}


def configure_devices(local_rank: int, local_size: int, env: Mapping[str, str], num_threads: int | None = None) -> None:
    """Sets this process's GPU and threads, before TensorFlow initialises its devices.

    Settings of the user or the launcher are kept: a single visible GPU, and the sizes of thread pools.

    Args:
        local_rank: int, this process's number on its host.
        local_size: int, the number of processes on this host.
        env: mapping of environment variables.
        num_threads: int, how many threads compute, see `equal_threads`; by default it follows from the number of
            processes and the size of this one's affinity mask.

    Raises:
        ScopeError: if TensorFlow has already initialised the GPUs.
    """
    affinity, num_cpus = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if local_size > 1:
        _set_gpu(local_rank, local_size, env)
        if affinity == 1 and num_cpus // local_size > 1:
            logger.warning(
                "this rank is bound to one core of %d, shared by all of TensorFlow's threads. Fix: "
                "`mpirun --bind-to none`, or `kdist run`, which sets it.",
                num_cpus,
            )
    if num_threads is None:
        # A mask smaller than the host may be this rank's own, or that of a container that all ranks share.
        num_threads = threads_per_rank(affinity, num_cpus, local_size)
    if local_size > 1 or num_threads < affinity:
        _set_threads(num_threads, env)


def shares_gpus(local_size: int, env: Mapping[str, str]) -> bool:
    """Returns whether ranks of this host are known to share a GPU: all see the same ones, and these are fewer.

    A launcher that gives each rank GPUs of its own names them in the environment.

    Args:
        local_size: int, the number of processes on this host.
        env: mapping of environment variables.
    """
    return not _CHOICES & env.keys() and 0 < len(tf.config.list_physical_devices("GPU")) < local_size


def _set_gpu(local_rank: int, local_size: int, env: Mapping[str, str]) -> None:
    visible = tf.config.get_visible_devices("GPU")
    num_gpus = len(visible)
    if not visible:
        return
    try:
        if len(visible) > 1:
            visible = [device_of(visible, local_rank)]
            tf.config.set_visible_devices(visible, "GPU")
        for gpu in visible:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise _too_late(f"choose a GPU for local rank {local_rank}", error) from error
    if local_size > num_gpus > 1 or shares_gpus(local_size, env):
        logger.warning("%d ranks share %d GPU(s) of this host", local_size, num_gpus)


def has_gpu() -> bool:
    """Returns whether TensorFlow computes on a GPU in this process."""
    return bool(tf.config.get_visible_devices("GPU"))


def hide_gpus() -> None:
    """Hides all GPUs from a process that does not compute, before TensorFlow initialises its devices.

    Raises:
        ScopeError: if TensorFlow has already initialised the GPUs.
    """
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:
        raise _too_late("leave the GPUs to the workers", error) from error


def _too_late(what: str, error: RuntimeError) -> ScopeError:
    return ScopeError(
        f"TensorFlow initialised its devices before kdist.scope() could {what}. Received: {error} Expected no tensor "
        f"before the first call of kdist, in {user_line()}. Fix: move that line up, above "
        "the first one that makes a tensor, a layer or a model."
    )


def device_of(devices: Sequence[Any], local_rank: int) -> Any:
    """Returns the device of a local rank: round-robin over those of its host."""
    return devices[local_rank % len(devices)]


def threads_per_rank(affinity: int, num_cpus: int, local_size: int) -> int:
    """Returns how many threads a rank may run.

    Args:
        affinity: int, the CPUs that this process may run on.
        num_cpus: int, the CPUs of the host.
        local_size: int, the ranks on the host.

    Returns:
        An int: the CPUs of its affinity mask, divided by the ranks that share the mask; at least 1.
    """
    sharing = max(1, -(-local_size * affinity // num_cpus))
    return max(1, affinity // sharing)


def cpus_of_process(local_size: int) -> str:
    """Returns the host's name, the CPUs that this process may run on, and the ranks of its host, as text."""
    return json.dumps([os.uname().nodename, sorted(os.sched_getaffinity(0)), local_size])


def equal_threads(cpus: Sequence[str]) -> int:
    """Returns how many threads each rank may run: as many on all, the fewest that one has.

    TensorFlow adds up the numbers of a tensor in as many pieces as it has threads. Ranks with other numbers of threads
    would round the norm of a gradient otherwise, and then hold other weights.

    Args:
        cpus: sequence of str, `cpus_of_process` of each rank.

    Returns:
        An int: the CPUs of a rank's affinity mask, divided by the ranks that have the same one; at least 1.
    """
    shares = []
    for text in cpus:
        _, mask, local_size = json.loads(text)
        shares.append(max(1, len(mask) // min(cpus.count(text), local_size)))  # two hosts may have the same name
    return min(shares)


def own_threads(env: Mapping[str, str]) -> int:
    """Returns how many threads TensorFlow computes with in this process; 0 where a GPU computes.

    Args:
        env: mapping of environment variables.
    """
    if has_gpu():
        return 0
    asked = env.get("TF_NUM_INTRAOP_THREADS", "")
    return (
        tf.config.threading.get_intra_op_parallelism_threads()
        or (int(asked) if asked.isdecimal() else 0)
        or len(os.sched_getaffinity(0))
    )


def _set_threads(threads: int, env: Mapping[str, str]) -> None:
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads() and "TF_NUM_INTRAOP_THREADS" not in env:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        if not tf.config.threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in env:
            # One more than compute threads: a thread that waits in a collective must not block the input pipeline. On
            # one core it would compete with the others, which costs a tenth of a short step.
            tf.config.threading.set_inter_op_parallelism_threads(threads + 1 if threads > 1 else 1)
    except RuntimeError:
        logger.debug("TensorFlow was used before kdist.scope(): its thread pools are unchanged")
