"""What a worker or a ps does in a scope: it serves until the chief is done."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from kdist.strategies.attendance import Line, port_taken, task_name
from kdist.strategies.devices import share, threads_per_rank

logger = logging.getLogger("kdist")


def serve(
    cluster: Mapping[str, Sequence[str]], job: str, index: int, *, local_rank: int, local_size: int, timeout: float
) -> NoReturn:
    """Serves the chief's steps (a worker) or holds variables (a ps), until the chief is done.

    Args:
        cluster: mapping of job name to addresses.
        job: str, `"worker"` or `"ps"`.
        index: int, this task's index within its job.
        local_rank: int, this process's number on its host.
        local_size: int, the number of processes on this host.
        timeout: float, seconds that the chief has to appear.

    Raises:
        SystemExit: with code 0, when the chief is done: the script ends here.
        ClusterError: if this task's port is taken, or the chief does not appear.
        ClusterLostError: if the chief failed or is lost.
    """
    address = cluster[job][index]
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec({name: list(addresses) for name, addresses in cluster.items()}),
            job_name=job,
            task_index=index,
            protocol="grpc",
            config=_config(cluster, job, local_rank, local_size),
        )
    except tf.errors.OpError as error:
        raise port_taken(task_name(job, index), address, error) from error
    line = Line(cluster, job, index, timeout)
    logger.info("%s serves at %s", task_name(job, index), address)
    line.wait()
    del server
    raise SystemExit(0)


def _config(cluster: Mapping[str, Sequence[str]], job: str, local_rank: int, local_size: int) -> Any:
    """Returns the session configuration of a server: its share of the host's cores, and a worker's GPU."""
    config = tf.compat.v1.ConfigProto()
    config.intra_op_parallelism_threads = threads_per_rank(
        len(os.sched_getaffinity(0)), os.cpu_count() or 1, local_size
    )
    # TensorFlow's servers may wait for each other in these threads: with fewer than workers, for ever.
    config.inter_op_parallelism_threads = max(
        len(cluster.get("worker", ())) + 1, config.intra_op_parallelism_threads + 1
    )
    gpus = tf.config.get_visible_devices("GPU")
    if job == "worker" and gpus:
        # The number of the physical device: under an MPI launcher this process has chosen its own already.
        config.gpu_options.visible_device_list = share(gpus, local_rank).name.rpartition(":")[2]
        config.gpu_options.allow_growth = True
    else:
        config.device_count["GPU"] = 0
    return config
