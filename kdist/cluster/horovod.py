"""horovodrun's Gloo launcher; with the MPI controller, horovodrun starts mpirun, whose row matches instead."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.variables import place
from kdist.errors import ClusterError


def horovod(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of horovodrun's Gloo launcher.

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
        return "HOROVOD_RANK is not set"
    return place(
        env,
        "horovod",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
    )
