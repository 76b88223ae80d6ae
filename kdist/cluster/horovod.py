"""horovodrun: its own Gloo launcher, and what it makes of Open MPI's mpirun."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.variables import place
from kdist.errors import ClusterError


def horovod(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of horovodrun's Gloo launcher, and of the mpirun that it starts for its MPI controller.

    The latter is known by the settings that horovodrun alone gives to Open MPI; of other MPIs' mpirun nothing tells
    it, and their own rows match.

    Args:
        env: mapping of variable name to value.

    Returns:
        The place, or a sentence that says why this launcher did not start the process.

    Raises:
        ClusterError: if the variables are malformed, or the job is elastic.
    """
    if env.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ClusterError(
            f"Received HOROVOD_ELASTIC={env['HOROVOD_ELASTIC']!r}: an elastic job, whose ranks come and go. Expected "
            f"a fixed number of ranks. Fix: run `horovodrun -np N` without --min-np, --max-np and "
            f"--host-discovery-script, and resume from a checkpoint after a failure."
        )
    if "HOROVOD_RANK" not in env and "HOROVOD_SIZE" not in env:
        if "OMPI_COMM_WORLD_SIZE" not in env or not _is_horovodruns_mpirun(env):
            return "HOROVOD_RANK is not set"
        return place(
            env,
            "horovod",
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    return place(
        env,
        "horovod",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
    )


def _is_horovodruns_mpirun(env: Mapping[str, str]) -> bool:
    # `-mca pml ob1 -mca btl ^openib` is often written by hand; the interface for NCCL, on CPUs too, is not.
    return (env.get("OMPI_MCA_pml"), env.get("OMPI_MCA_btl")) == ("ob1", "^openib") and "NCCL_SOCKET_IFNAME" in env
