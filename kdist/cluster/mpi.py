"""MPI's own launchers: Open MPI 4 and 5, MVAPICH, Intel MPI, and MPICH's Hydra."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.slurm import in_step
from kdist.cluster.variables import integer, quote, read_info
from kdist.errors import ClusterError


def openmpi(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of Open MPI's `mpirun`, the same ones in version 4 (orted) and 5 (PRRTE); see `Reader`.

    Raises:
        ClusterError: also if `prterun` started the process without them.
    """
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return read_info(
            env,
            "openmpi",
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    if "PMIX_RANK" in env and not in_step(env):
        # A bare `prterun` sets a rank but no size: N processes would each train by themselves.
        raise ClusterError(
            f"The number of ranks is unknown. Received: PMIX_RANK={env['PMIX_RANK']!r} without OMPI_COMM_WORLD_SIZE. "
            f"Expected the variables of Open MPI, too. Fix: use `mpirun` instead of `prterun`."
        )
    return "OMPI_COMM_WORLD_SIZE is not set"


def mvapich(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of MVAPICH's launchers (`mpirun_rsh` and its Hydra); see `Reader`."""
    family = "MV2" if "MV2_COMM_WORLD_RANK" in env or "MV2_COMM_WORLD_SIZE" in env else "MVP"
    names = {
        "rank": f"{family}_COMM_WORLD_RANK",
        "size": f"{family}_COMM_WORLD_SIZE",
        "local_rank": f"{family}_COMM_WORLD_LOCAL_RANK",
        "local_size": f"{family}_COMM_WORLD_LOCAL_SIZE",
    }
    if names["rank"] not in env and names["size"] not in env:
        return "neither MV2_COMM_WORLD_SIZE nor MVP_COMM_WORLD_SIZE is set"
    return read_info(env, "mvapich", **names)


def intel_mpi(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of Intel MPI's Hydra: MPICH's, and some `I_MPI_...`; see `Reader`."""
    if not any(name.startswith("I_MPI_") for name in env):
        return "no I_MPI_... variable is set"
    return _hydra(env, "intel_mpi")


def mpich(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of MPICH's Hydra and of other launchers with PMI; see `Reader`."""
    return _hydra(env, "mpich")


def _hydra(env: Mapping[str, str], launcher: str) -> ClusterInfo | str:
    if "PMI_RANK" not in env and "PMI_SIZE" not in env:
        return "PMI_RANK is not set"
    if in_step(env) and "MPI_LOCALRANKID" not in env:
        return "PMI_RANK was set by srun, whose own variables are used"
    for local_rank, local_size in (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")):
        if local_rank in env:
            return read_info(
                env, launcher, rank="PMI_RANK", size="PMI_SIZE", local_rank=local_rank, local_size=local_size
            )
    if integer(env, "PMI_SIZE", minimum=1) == 1:
        integer(env, "PMI_RANK", minimum=0, below=("PMI_SIZE", 1))
        return ClusterInfo(launcher=launcher, reason=quote(env, ("PMI_RANK", "PMI_SIZE")))
    # A guess could put all ranks of a host on its first GPU.
    raise ClusterError(
        f"The local rank is unknown. Received: {quote(env, ('PMI_RANK', 'PMI_SIZE'))}. Expected MPI_LOCALRANKID and "
        f"MPI_LOCALNRANKS, too. Fix: use the `mpirun` of MPICH or Intel MPI, or set both for each rank."
    )
