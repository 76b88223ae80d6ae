"""A TPU: one process controls all of its cores, so the size is 1."""

from __future__ import annotations

from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.variables import quote

# Variables of Cloud TPU: on Kubernetes (an address), and on a TPU VM (a TPU in this host).
_ENDPOINTS = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
_ON_THIS_HOST = ("TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_WORKER_HOSTNAMES")


def tpu(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables that name a TPU.

    Args:
        env: mapping of variable name to value.

    Returns:
        The `ClusterInfo` with the TPU's name, or a str: why there is no TPU.
    """
    for name in ("TPU_NAME", _ENDPOINTS):
        if env.get(name, "").strip():
            return ClusterInfo(launcher="tpu", tpu_name=env[name].strip(), reason=quote(env, (name,)))
    present = [name for name in _ON_THIS_HOST if env.get(name, "").strip()]
    if present:
        return ClusterInfo(launcher="tpu", tpu_name="local", reason=quote(env, present[:1]) + ": a TPU VM")
    return "TPU_NAME is not set"
