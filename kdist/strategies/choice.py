"""Which strategy a job gets: pure decisions, without TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.errors import StrategyError

MPI_LAUNCHERS = ("openmpi", "mpich", "intel_mpi", "mvapich", "slurm")
"""Launchers whose processes find each other over MPI."""

ENGINES: Mapping[str, tuple[str, ...]] = {
    "mpi": MPI_LAUNCHERS,
    "horovod": ("horovod", *MPI_LAUNCHERS),
    "collective": ("tf_config", *MPI_LAUNCHERS),
}
"""The engines, each with the launchers whose ranks it joins. `"auto"` takes the first that has the launcher."""

PARAMETER_SERVER = "parameter_server"
"""Asynchronous training: variables on parameter servers."""

PARAMETER_SERVER_LAUNCHERS = ("tf_config", *MPI_LAUNCHERS)
"""Launchers whose processes find a role in it: by TF_CONFIG, or by rank."""

PASSED_THROUGH = ("mirrored", "tpu")
"""Several replicas in one process: TensorFlow's own strategies."""

WORDS = ("auto", "single", *ENGINES, PARAMETER_SERVER, *PASSED_THROUGH)
"""The strategies that one word names."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a job gets, and why.

    Attributes:
        strategy: str, `"single"` (Keras' own code path), an engine (synchronous all-reduce by it),
            `"parameter_server"`, `"mirrored"` or `"tpu"`.
        why: str, one clause.
    """

    strategy: str
    why: str


def choose(
    word: str,
    info: ClusterInfo,
    *,
    num_gpus: int = 0,
    horovod_on_gpus: bool = False,
    is_synchronous: bool = False,
) -> Choice:
    """Chooses what a job gets.

    Args:
        word: str, one of `WORDS`.
        info: `ClusterInfo`, who this process is.
        num_gpus: int, the GPUs that this process sees.
        horovod_on_gpus: bool, whether the ranks have GPUs and a Horovod that sums on them, over NCCL. `"auto"` then
            takes it, for MPI would carry each gradient through the host's memory.
        is_synchronous: bool, whether the user has asked for an all-reduce, by whatever engine.

    Returns:
        The choice.

    Raises:
        StrategyError: if the word is unknown, or this version does not serve the job.

    Example:
    >>> choose("auto", ClusterInfo()).strategy
    'single'
    """
    if word not in WORDS:
        raise StrategyError(
            f"Unknown strategy. Received: strategy={word!r}. Expected one of {', '.join(map(repr, WORDS))}, a "
            "kdist.AllReduce, a kdist.ParameterServer, a kdist.TPU or a tf.distribute.Strategy. Fix: choose one of "
            "these."
        )
    if word == "single":
        return Choice("single", "asked for" if info.size == 1 else "asked for: each rank trains for itself")
    if "ps" in info.cluster_spec and (word in ENGINES or is_synchronous):
        asked = "kdist.AllReduce" if is_synchronous else f"strategy={word!r}"
        raise StrategyError(
            f"Synchronous training has no parameter servers. Received: {asked} and a cluster with ps "
            f"tasks ({info.reason}). Expected workers alone (and a chief). Fix: leave the ps out of TF_CONFIG, or "
            'choose strategy="auto" or a kdist.ParameterServer, which train asynchronously.'
        )
    if info.launcher in PARAMETER_SERVER_LAUNCHERS and (
        word == PARAMETER_SERVER or (word == "auto" and "ps" in info.cluster_spec)
    ):
        return Choice(PARAMETER_SERVER, f"the cluster has {info.size} process(es): {info.reason}")
    if info.task_type == "evaluator":
        raise StrategyError(
            f"There is nothing for an evaluator to do. Received: the task type 'evaluator' and strategy={word!r} "
            f"({info.reason}). Expected an evaluator beside parameter servers only: workers that train together "
            'evaluate `validation_data` together. Fix: leave it out of TF_CONFIG; or choose strategy="single".'
        )
    if word in PASSED_THROUGH or (word == "auto" and info.size == 1):
        return _in_one_process(word, info, num_gpus)
    if word != PARAMETER_SERVER:
        preferred, why = _preferred(num_gpus, horovod_on_gpus) if word == "auto" else ([word], "")
        for engine in [*preferred, *ENGINES] if word == "auto" else [word]:
            if info.launcher in ENGINES[engine]:
                return Choice(engine, f"{info.launcher} started {info.size} process(es){why}: {info.reason}")
    if info.size == 1:
        return Choice("single", "there is one process")
    if word in ENGINES and any(info.launcher in launchers for launchers in ENGINES.values()):
        raise StrategyError(
            f"This strategy and this launcher do not fit. Received: strategy={word!r} and {info.size} process(es) of "
            f"{info.launcher} ({info.reason}). Expected one of {', '.join(ENGINES[word])} to start them. Fix: start "
            f'them by `kdist run --strategy {word} -np N script.py`, or choose strategy="auto".'
        )
    raise StrategyError(
        f"A job of this launcher is not served by this version. Received: {info.size} process(es) of {info.launcher} "
        f"({info.reason}). Expected one process, or ranks started by an MPI launcher or srun. Fix: start it by "
        '`kdist run -np N script.py`, or choose strategy="single" (KDIST_STRATEGY=single) to train each process for '
        "itself."
    )


def _preferred(num_gpus: int, horovod_on_gpus: bool) -> tuple[list[str], str]:
    """Returns the engines that go before the table's order where there are GPUs, and why."""
    if horovod_on_gpus:
        return ["horovod"], ", which have GPUs, and Horovod has NCCL"
    if num_gpus:
        return ["collective"], ", which have GPUs, whose gradients MPI would carry through the host's memory"
    return [], ""


def _in_one_process(word: str, info: ClusterInfo, num_gpus: int) -> Choice:
    if info.size > 1:
        raise StrategyError(
            f"This strategy is one process's. Received: strategy={word!r} and {info.size} process(es) of "
            f"{info.launcher} ({info.reason}). Expected one process, which has all devices. Fix: start the script by "
            'python alone, or choose strategy="auto", which trains one replica a process.'
        )
    if word == "mirrored":
        return Choice(word, "asked for")
    if word == "tpu" or info.launcher == "tpu":
        return Choice("tpu", info.reason if info.launcher == "tpu" else "asked for")
    if num_gpus > 1:
        return Choice("mirrored", f"there is one process, and it sees {num_gpus} GPUs")
    return Choice("single", "there is one process")
