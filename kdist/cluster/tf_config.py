"""TF_CONFIG, TensorFlow's description of a cluster: parsed and validated before anything connects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kdist.cluster.info import ClusterInfo
from kdist.errors import ClusterError

# The order of ranks. Evaluators do not train and have no rank.
_TRAINING_JOBS = ("chief", "worker", "ps")
_JOBS = (*_TRAINING_JOBS, "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def tf_config(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads `TF_CONFIG`.

    The chief has rank 0, then come workers, then parameter servers. The old job name `master` is a chief. An
    evaluator is rank 0 of 1.

    Args:
        env: mapping of variable name to value.

    Returns:
        The `ClusterInfo`, or a str: why there is no cluster.

    Raises:
        ClusterError: if `TF_CONFIG` is malformed or contradicts itself.
    """
    text = env.get("TF_CONFIG", "")
    if not text.strip():
        return "TF_CONFIG is not set"
    config = _parse(text)
    if not config.get("cluster"):
        return "TF_CONFIG has no cluster"
    cluster = _cluster(text, config["cluster"])
    task_type, index = _task(text, config.get("task"), cluster)
    reason = f"TF_CONFIG: task {task_type} {index} of " + ", ".join(f"{len(v)} {k}" for k, v in cluster.items())
    if task_type == "evaluator":
        return ClusterInfo(
            launcher="tf_config", task_type=task_type, task_index=index, cluster_spec=cluster, reason=reason
        )
    addresses = [address for job in _TRAINING_JOBS for address in cluster.get(job, ())]
    mine = cluster[task_type][index]
    neighbours = [address for address in addresses if _host(address) == _host(mine)]
    return ClusterInfo(
        launcher="tf_config",
        rank=addresses.index(mine),
        size=len(addresses),
        local_rank=neighbours.index(mine),
        local_size=len(neighbours),
        task_type=task_type,
        task_index=index,
        cluster_spec=cluster,
        reason=reason,
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(text, f"it is not JSON ({error})", f"an object like {_EXAMPLE}")
    if not isinstance(config, dict):
        _refuse(text, "it is not a JSON object", f"an object like {_EXAMPLE}")
    return config


def _cluster(text: str, value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        _refuse(text, f"its cluster is {value!r}", "an object of job names and lists of addresses")
    cluster: dict[str, tuple[str, ...]] = {}
    for name, addresses in value.items():
        job = "chief" if name == "master" else name
        if job not in _JOBS:
            _refuse(text, f"its cluster has a job {name!r}", f"the jobs {', '.join(_JOBS)}")
        if job in cluster:
            _refuse(text, "its cluster has both a chief and a master", "one chief (`master` is its old name)")
        if not isinstance(addresses, list) or not all(isinstance(a, str) and _host(a) for a in addresses):
            _refuse(text, f"its job {name!r} is {addresses!r}", "a list of addresses, each as 'host:port'")
        if addresses:
            cluster[job] = tuple(addresses)
    if len(cluster.get("chief", ())) > 1:
        _refuse(text, f"its cluster has {len(cluster['chief'])} chiefs", "one chief at most")
    all_addresses = [address for addresses in cluster.values() for address in addresses]
    duplicates = sorted({address for address in all_addresses if all_addresses.count(address) > 1})
    if duplicates:
        _refuse(text, f"more than one task has the address {', '.join(duplicates)}", "one address per task")
    if not ("chief" in cluster or "worker" in cluster):
        _refuse(text, "its cluster has neither a chief nor a worker", "at least one of them")
    return cluster


def _task(text: str, task: Any, cluster: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        _refuse(text, f"its task is {task!r}", 'this process\'s own task, as {"type": "worker", "index": 0}')
    job, index = task.get("type"), task.get("index", 0)
    job = "chief" if job == "master" else job
    if not isinstance(job, str) or job not in (*cluster, "evaluator"):
        _refuse(text, f"its task has the type {task.get('type')!r}", f"one of {', '.join(cluster)}")
    if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 10:
        index = int(index)
    # Evaluators need not be listed in the cluster.
    total = len(cluster.get(job, ("",)))
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < total:
        _refuse(
            text, f"its task has the index {index!r}", f"an integer from 0 to {total - 1}: {job} has {total} task(s)"
        )
    return job, index


def _host(address: str) -> str:
    """Returns the host of `host:port`, or an empty string if it is malformed."""
    host, _, port = address.rpartition(":")
    return host if port.isascii() and port.isdecimal() and 0 < int(port[:9]) < 65536 and not host.isspace() else ""


def _refuse(text: str, problem: str, expected: str) -> NoReturn:
    raise ClusterError(
        f"TF_CONFIG is invalid: {problem}. Received: TF_CONFIG={text!r}. Expected {expected}. "
        f"Fix: correct TF_CONFIG where the job is started, or unset it."
    )
