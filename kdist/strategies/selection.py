"""The selection of a strategy for a job: pure functions, without TensorFlow."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from kdist.cluster.info import ClusterInfo
from kdist.errors import StrategyError
from kdist.restarts.events import own_reports

MPI_LAUNCHERS = ("openmpi", "mpich", "intel_mpi", "mvapich", "slurm")
"""Launchers whose processes connect over MPI."""

LAUNCHER_NAMES: Mapping[str, str] = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "Intel MPI",
    "mvapich": "MVAPICH",
    "slurm": "Slurm",
    "horovod": "horovodrun",
    "tf_config": "TF_CONFIG",
}
"""Launchers as they call themselves, for the log."""

ENGINES: Mapping[str, tuple[str, ...]] = {
    "mpi": MPI_LAUNCHERS,
    "horovod": ("horovod", *MPI_LAUNCHERS),
    "collective": ("tf_config", *MPI_LAUNCHERS),
}
"""The engines, each with the launchers that it supports. `"auto"` takes the first that supports the launcher."""

PARAMETER_SERVER = "parameter_server"
"""Asynchronous training: variables on parameter servers."""

PARAMETER_SERVER_LAUNCHERS = ("tf_config", *MPI_LAUNCHERS)
"""Launchers that it supports: roles follow from TF_CONFIG or from the rank."""

PASSED_THROUGH = ("mirrored", "tpu")
"""Several replicas in one process: TensorFlow's own strategies."""

WORDS = ("auto", "single", *ENGINES, PARAMETER_SERVER, *PASSED_THROUGH)
"""The values of `strategy` that are words."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The strategy of a job, and the reason.

    Attributes:
        strategy: str, `"single"` (Keras' own code path), an engine (synchronous all-reduce by it),
            `"parameter_server"`, `"mirrored"` or `"tpu"`.
        why: str, the reason, for the log.
    """

    strategy: str
    why: str


def closest_word(word: str) -> str:
    """Returns what to do about a word that names no strategy: the word that it resembles, if there is one."""
    near = difflib.get_close_matches(word, WORDS, n=1)
    return f"write {near[0]!r}, if that was meant" if near else "use one of these words"


def check_word(word: str) -> None:
    """Raises for a word that names no strategy.

    Args:
        word: str, as given to `kdist.scope`.

    Raises:
        StrategyError: if it is unknown.
    """
    if word not in WORDS:
        raise StrategyError(
            f"Unknown strategy. Received: strategy={word!r}. Expected one of {', '.join(map(repr, WORDS))}, a "
            "kdist.AllReduce, a kdist.ParameterServer, a kdist.TPU or a tf.distribute.Strategy. Fix: "
            f"{closest_word(word)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What the ranks have, by which `"auto"` chooses how they communicate.

    Attributes:
        num_gpus: int, the GPUs that this process sees.
        horovod_on_gpus: bool, whether the ranks have GPUs and a Horovod with NCCL. It is taken then, because MPI would
            copy each gradient through host memory.
        shares_gpus: bool, whether ranks are known to share a GPU, where NCCL carries nothing. MPI is taken then, which
            copies gradients through host memory with less delay than TensorFlow's collective ops.
        has_mpi: bool, whether MPI can connect the ranks. Else TensorFlow's collective ops are taken.
    """

    num_gpus: int = 0
    horovod_on_gpus: bool = False
    shares_gpus: bool = False
    has_mpi: bool = True


def choose(
    word: str, info: ClusterInfo, resources: Resources = Resources(), *, is_synchronous: bool = False
) -> Selection:
    """Selects the strategy of a job.

    Args:
        word: str, one of `WORDS`.
        info: `ClusterInfo`.
        resources: `Resources`, of the ranks.
        is_synchronous: bool, whether the user asked for an all-reduce with any engine.

    Returns:
        The `Selection`.

    Raises:
        StrategyError: if the word is unknown, or the job is not supported.

    Example:
    >>> choose("auto", ClusterInfo()).strategy
    'single'
    """
    _check(word, info, is_synchronous)
    if word == "single":
        return Selection("single", "requested" if info.size == 1 else "requested: each rank trains independently")
    if _has_servers(word, info):
        return Selection(PARAMETER_SERVER, f"the cluster has {info.size} process(es): {info.reason}")
    if word in PASSED_THROUGH or (word == "auto" and info.size == 1):
        return _in_one_process(word, info, resources.num_gpus)
    if word != PARAMETER_SERVER:
        preferred, why = _preferred(resources) if word == "auto" else ([word], "")
        for engine in [*preferred, *ENGINES] if word == "auto" else [word]:
            if info.launcher in ENGINES[engine]:
                return Selection(engine, f"started by {_launcher_name(info)}{why}")
    if info.size == 1:
        return Selection("single", "there is one process")
    raise _unsupported(word, info)


def _launcher_name(info: ClusterInfo) -> str:
    """Returns what started the ranks, in words: `kdist run` and `kdist.launch` make a `TF_CONFIG` of their own."""
    if info.launcher == "tf_config" and own_reports.running is not None:
        return "kdist"
    return LAUNCHER_NAMES.get(info.launcher, info.launcher)


def _has_servers(word: str, info: ClusterInfo) -> bool:
    """Returns whether the job trains with parameter servers."""
    is_asked_for = word == PARAMETER_SERVER or (word == "auto" and "ps" in info.cluster_spec)
    return info.launcher in PARAMETER_SERVER_LAUNCHERS and is_asked_for


def _check(word: str, info: ClusterInfo, is_synchronous: bool) -> None:
    """Raises if the word is unknown, or the cluster has tasks that the strategy has no use for."""
    check_word(word)
    if "ps" in info.cluster_spec and (word in ENGINES or (is_synchronous and word != "single")):
        asked = "kdist.AllReduce" if is_synchronous else f"strategy={word!r}"
        raise StrategyError(
            f"Synchronous training has no parameter servers. Received: {asked} and a cluster with ps "
            f"tasks ({info.reason}). Expected only workers (and a chief). Fix: leave the ps out of TF_CONFIG, or "
            'choose strategy="auto" or a kdist.ParameterServer, which train asynchronously.'
        )
    if info.task_type == "evaluator" and word != "single" and not _has_servers(word, info):
        raise StrategyError(
            f"Synchronous training has no evaluator. Received: the task type 'evaluator' and strategy={word!r} "
            f"({info.reason}). Expected an evaluator only with parameter servers: synchronous workers evaluate "
            '`validation_data` themselves. Fix: leave it out of TF_CONFIG; or choose strategy="single".'
        )


def _unsupported(word: str, info: ClusterInfo) -> StrategyError:
    """Returns the error of several processes whose launcher no engine supports, or not the one that was asked for."""
    if word in ENGINES and any(info.launcher in launchers for launchers in ENGINES.values()):
        return StrategyError(
            f"This strategy does not support this launcher. Received: strategy={word!r} and {info.size} process(es) of "
            f"{info.launcher} ({info.reason}). Expected one of {', '.join(ENGINES[word])}. Fix: start "
            f'them with `kdist run --strategy {word} -np N script.py`, or choose strategy="auto".'
        )
    return StrategyError(
        f"This launcher is not supported. Received: {info.size} process(es) of {info.launcher} "
        f"({info.reason}). Expected one process, or ranks started by an MPI launcher or srun. Fix: start it with "
        '`kdist run -np N script.py`, or choose strategy="single" (KDIST_STRATEGY=single) to train each '
        "process independently."
    )


def agreed(own: Selection, strategies: Sequence[tuple[str, str]]) -> Selection:
    """Returns what all ranks of a Slurm step take.

    Args:
        own: `Selection`, of this rank.
        strategies: sequence of pairs, each rank's node and the strategy that it would take.

    Returns:
        `own`, if all take the same one, and else TensorFlow's collective ops, which need nothing that a node may lack.

    Example:
    >>> agreed(Selection("mpi", "started by Slurm"), [("n0", "mpi"), ("n1", "collective")]).strategy
    'collective'
    """
    if len({strategy for _, strategy in strategies}) == 1:
        return own
    return Selection("collective", f"started by Slurm, whose nodes differ: {differing(strategies)}")


def differing(strategies: Sequence[tuple[str, str]]) -> str:
    """Returns in words which nodes would take which strategy.

    Example:
    >>> differing([("n0", "mpi"), ("n0", "mpi"), ("n1", "collective"), ("n2", "mpi")])
    'mpi on n0, n2; collective on n1'
    """
    nodes: dict[str, dict[str, None]] = {}
    for node, strategy in strategies:
        nodes.setdefault(strategy, {})[node] = None
    return "; ".join(f"{strategy} on {', '.join(those)}" for strategy, those in nodes.items())


def _preferred(resources: Resources) -> tuple[list[str], str]:
    """Returns the engines that are preferred where there are GPUs, or no MPI, and why."""
    if not resources.has_mpi:
        return ["collective"], " without MPI between them (that takes mpi4py and an MPI, and srun --mpi=pmix or pmi2)"
    if resources.shares_gpus:
        return ["mpi"], ", which share GPUs: gradients go through host memory"
    if resources.horovod_on_gpus:
        return ["horovod"], ", which have GPUs, and Horovod has NCCL"
    if resources.num_gpus:
        return ["collective"], ", which have GPUs; MPI would copy gradients through host memory"
    return [], ""


def check_one_process(received: str, info: ClusterInfo) -> None:
    """Raises for a strategy of one process in a job of several, each of which would train by itself.

    Args:
        received: str, the strategy, for the message.
        info: `ClusterInfo`.

    Raises:
        StrategyError: if there are several.
    """
    if info.size > 1:
        raise StrategyError(
            f"This strategy runs in one process. Received: {received} and {info.size} process(es) of "
            f"{info.launcher} ({info.reason}). Expected one process, which has all devices. Fix: start the script with "
            '`python`, or choose strategy="auto", which trains one replica per process.'
        )


def _in_one_process(word: str, info: ClusterInfo, num_gpus: int) -> Selection:
    check_one_process(f"strategy={word!r}", info)
    if word == "mirrored":
        return Selection(word, "requested")
    if word == "tpu" or info.launcher == "tpu":
        return Selection("tpu", info.reason if info.launcher == "tpu" else "requested")
    if num_gpus > 1:
        return Selection("mirrored", f"there is one process, and it sees {num_gpus} GPUs")
    return Selection("single", "there is one process")
