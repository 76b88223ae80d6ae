"""horovodrun: its own Gloo launcher, and Open MPI's mpirun as horovodrun starts it."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.variables import read_info
from kdist.errors import ClusterError


def horovod(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of horovodrun's Gloo launcher, and of the mpirun that it starts for its MPI controller.

    The latter is recognised by settings that only horovodrun passes to Open MPI. With other MPIs nothing identifies
    it, and their own rows match. See `Reader`.

    Raises:
        ClusterError: also if the job is elastic.
    """
    if env.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ClusterError(
            f"Horovod's elastic jobs are not supported. Received: HOROVOD_ELASTIC={env['HOROVOD_ELASTIC']!r}. Expected "
            f"a fixed number of ranks. Fix: run `horovodrun -np N` without --min-np, --max-np and "
            f"--host-discovery-script, or kdist run --restarts 3 --min-np N -H HOST:SLOTS,..."
        )
    if "HOROVOD_RANK" not in env and "HOROVOD_SIZE" not in env:
        if "OMPI_COMM_WORLD_SIZE" not in env or not _started_by_horovodrun(env):
            return "HOROVOD_RANK is not set"
        return read_info(
            env,
            "horovod",
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    return read_info(
        env,
        "horovod",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
    )


def _started_by_horovodrun(env: Mapping[str, str]) -> bool:
    # Users often set `-mca pml ob1 -mca btl ^openib`, but rarely with NCCL_SOCKET_IFNAME.
    return (env.get("OMPI_MCA_pml"), env.get("OMPI_MCA_btl")) == ("ob1", "^openib") and "NCCL_SOCKET_IFNAME" in env
