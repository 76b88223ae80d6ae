"""The TensorFlow server of a worker or ps, which runs until the chief has finished."""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

import tensorflow as tf

from kdist.cluster.info import ClusterInfo
from kdist.parameter_server.connection import ChiefConnection, Cluster, port_in_use, task_name
from kdist.strategies.devices import device_of, threads_per_rank
from kdist.strategies.options import ParameterServer

logger = logging.getLogger("kdist")


def serve(cluster: Cluster, job: str, index: int, info: ClusterInfo, options: ParameterServer) -> NoReturn:
    """Runs the chief's steps (a worker) or holds variables (a ps), until the chief has finished.

    Args:
        cluster: mapping of job name to addresses.
        job: str, `"worker"` or `"ps"`.
        index: int, this task's index within its job.
        info: `ClusterInfo`, as the launcher set it.
        options: `ParameterServer`.

    Raises:
        SystemExit: with code 0, when the chief has finished: the script ends here.
        ClusterError: if this task's port is in use, or the chief cannot be reached.
        ClusterLostError: if the chief failed or is lost.
    """
    address = cluster[job][index]
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec({name: list(addresses) for name, addresses in cluster.items()}),
            job_name=job,
            task_index=index,
            protocol="grpc",
            config=_config(cluster, job, info.local_rank, info.local_size),
        )
    except tf.errors.OpError as error:
        raise port_in_use(task_name(job, index), address, error) from error
    chief = ChiefConnection(cluster, job, index, options.timeout)
    logger.info("%s serves at %s", task_name(job, index), address)
    chief.wait()
    del server
    raise SystemExit(0)


def _config(cluster: Cluster, job: str, local_rank: int, local_size: int) -> Any:
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
        config.gpu_options.visible_device_list = device_of(gpus, local_rank).name.rpartition(":")[2]
        config.gpu_options.allow_growth = True
    else:
        config.device_count["GPU"] = 0
    return config
