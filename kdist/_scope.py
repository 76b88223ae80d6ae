"""`kdist.scope`, the entry point: cluster -> strategy -> scope.

Not `scope.py`: a module of that name would hide `kdist.scope`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kdist import _arguments, _strategy_scopes
from kdist._engine import select_together
from kdist._process import cluster_info
from kdist._scope_context import ScopeContext
from kdist._suggestions import with_suggestions
from kdist.errors import ScopeError, StrategyError
from kdist.reports.log import show_log
from kdist.reports.scope_marks import own_scopes
from kdist.strategies.options import TPU, AllReduce, ParameterServer
from kdist.strategies.selection import PARAMETER_SERVER, PASSED_THROUGH, check_one_process

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger("kdist")

_OF_ONE_PROCESS = ("MirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy", "_DefaultDistributionStrategy")


@with_suggestions
def scope(
    strategy: (
        Literal["auto", "single", "mpi", "horovod", "collective", "parameter_server", "mirrored", "tpu"]
        | AllReduce
        | ParameterServer
        | TPU
        | tf.distribute.Strategy
    ) = "auto",
    *,
    scale_batch: bool = True,
    scale_lr: Literal["auto", "linear", "sqrt"] | float | None = "auto",
    warmup_epochs: Literal["auto"] | float = "auto",
    auto_shard: bool = True,
    stall_timeout: Literal["auto"] | float | None = "auto",
    micro_batches: int | None = None,
) -> ScopeContext:
    """Makes the Keras models inside train on all processes of the job.

    By default the global batch and the learning rate grow with the processes. With `scale_batch=False` both stay as
    they are, and the result is that of one process, to rounding.

    In one process with one device nothing changes without `micro_batches`: models run Keras' own code. Among several
    processes, models made or used in the scope are trained by synchronous data parallelism; a model made in the scope
    stays distributed after it.

    Each argument has an environment variable (`KDIST_STRATEGY`, `KDIST_SCALE_BATCH`, `KDIST_SCALE_LR`,
    `KDIST_WARMUP_EPOCHS`, `KDIST_AUTO_SHARD`, `KDIST_STALL_TIMEOUT`, `KDIST_MICRO_BATCHES`), which applies where
    the code has the default.

    Collective: every rank must call this, in the same order.

    Args:
        strategy: `"auto"` (what the launcher implies), `"single"` (no distribution: among N ranks, N independent
            trainings), `"mpi"`, `"horovod"`, `"collective"` (synchronous, over that engine), `"parameter_server"`,
            `"mirrored"` (several devices of one process), `"tpu"`, an `AllReduce`, a `ParameterServer`, a `TPU`, or
            your own `tf.distribute.Strategy`, which is used unchanged.
        scale_batch: bool, whether `batch_size` is what each replica sees, so that the global batch grows with the
            replicas. If `False`, each batch is split over them.
        scale_lr: how the learning rate grows with the global batch: `"auto"` (linear for SGD, square root for
            adaptive optimizers), `"linear"`, `"sqrt"`, a number to multiply by, or `None` for no change.
        warmup_epochs: a number of epochs of warm-up, or `"auto"`: 5 or a tenth of the run, whichever is shorter.
        auto_shard: bool, whether kdist shards the data over the ranks. If `False`, each rank trains on its own input.
        stall_timeout: float or `None`, seconds that a rank may block the others before the job ends with a message that
            names it; `None` for no limit. `"auto"` is 600, and only a warning for a rank that is busy, or in your own
            code (a callback, or between two calls of `fit`).
        micro_batches: int or `None`, how many of your batches a step of `fit` takes, on any number of ranks, one too:
            for jobs whose number of ranks changes. By default it is the number of ranks. Fewer ranks than
            `micro_batches` hold more rows each.

    Returns:
        A context manager, which yields the `tf.distribute.Strategy` in use.

    Raises:
        ClusterError: if the launcher's variables contradict each other or the engine.
        ScopeError: if a scope is open already, or Keras does not run on TensorFlow.
        StrategyError: if the strategy or a setting is unknown.

    Example:
    ```python
    with kdist.scope():
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile(optimizer="sgd", loss="mse")
        model.fit(x, y, batch_size=64, epochs=5)
    ```
    """
    given = {
        "strategy": strategy,
        "scale_batch": scale_batch,
        "scale_lr": scale_lr,
        "warmup_epochs": warmup_epochs,
        "auto_shard": auto_shard,
        "stall_timeout": stall_timeout,
        "micro_batches": micro_batches,
    }
    _arguments.check_values(given)
    return ScopeContext(functools.partial(_entered, given))


@contextlib.contextmanager
def _entered(given: Mapping[str, Any]) -> Iterator[tf.distribute.Strategy]:
    chosen = _arguments.with_environment(given, os.environ)
    _arguments.check(chosen, os.environ)
    with _single_open_scope(chosen), _chosen_scope(chosen) as strategy:
        yield strategy


def _chosen_scope(chosen: dict[str, Any]) -> contextlib.AbstractContextManager[tf.distribute.Strategy]:
    """Returns the scope of what the arguments and the launcher ask for."""
    asked = chosen["strategy"]
    if not isinstance(asked, (str, AllReduce, ParameterServer, TPU)):
        _refuse_multi_worker(asked)
        if any(each.__name__ in _OF_ONE_PROCESS for each in type(asked).__mro__):
            check_one_process(type(asked).__name__, cluster_info())
        own_scopes.mark_alone()
        _refuse_micro_batches(chosen, type(asked).__name__)
        if chosen["scale_lr"] in ("auto", None):  # the strategy's own conventions, unless the user sets a scale
            chosen.update(scale_batch=False, scale_lr=None)
        return _strategy_scopes.passed_through(asked, chosen)
    info = cluster_info()
    if info.size == 1 and "KDIST_LOG" in os.environ:  # else Python shows warnings
        show_log(info)
    for name, meant in _arguments.misspelled(os.environ).items() if info.is_chief else ():
        show_log(info)
        logger.warning("the variable %s is unknown, and has no effect. Fix: did you mean %s?", name, meant)
    word = asked if isinstance(asked, str) else asked.word
    selection = select_together(word, info, is_synchronous=isinstance(asked, AllReduce))
    is_single = selection.strategy == "single"
    is_alone = is_single or selection.strategy in (PARAMETER_SERVER, *PASSED_THROUGH)
    if not is_alone or (is_single and info.size == 1 and not _is_plain(chosen)):
        return _strategy_scopes.all_reduce(info, selection, chosen, is_plain=_is_plain(chosen))
    if not (is_single and _is_plain(chosen)):
        who = "'single', by which each rank trains for itself" if is_single else repr(selection.strategy)
        _refuse_micro_batches(chosen, who)
    own_scopes.mark_alone()  # the tasks of parameter servers do not wait for each other either
    if is_single:
        return contextlib.nullcontext(_strategy_scopes.default_strategy(info))
    if selection.strategy == PARAMETER_SERVER:
        return _strategy_scopes.parameter_server(info, asked, chosen)
    return _strategy_scopes.passed_through(_strategy_scopes.tensorflow_strategy(info, selection, asked), chosen)


@contextlib.contextmanager
def _single_open_scope(chosen: Mapping[str, Any]) -> Iterator[None]:
    if own_scopes.is_open:
        raise ScopeError(
            "A kdist scope is open already. Received: kdist.scope() inside of kdist.scope(). Expected one at a time. "
            "Fix: close the first one before, or remove the inner one."
        )
    with own_scopes.entered(chosen):
        yield


def _is_plain(chosen: Mapping[str, Any]) -> bool:
    """Returns whether one process trains as without kdist."""
    return own_scopes.is_planned or chosen["micro_batches"] in (None, 1)


def _refuse_micro_batches(chosen: Mapping[str, Any], strategy: str) -> None:
    if chosen["micro_batches"] is not None:
        raise StrategyError(
            "micro_batches is for ranks that train together by all-reduce. Received: "
            f"micro_batches={chosen['micro_batches']} with {strategy}. Expected 'mpi', 'horovod' or 'collective'. Fix: "
            "choose one of these, or omit micro_batches."
        )


def _refuse_multi_worker(strategy: tf.distribute.Strategy) -> None:
    """Raises for TensorFlow's strategies of several processes, for which kdist has its own."""
    import tensorflow as tf

    names = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy")
    name = next((name for name in names if isinstance(strategy, getattr(tf.distribute, name))), None)
    if name is None:
        return
    partitioned = ""
    if getattr(strategy.extended, "_variable_partitioner", None) is not None:
        partitioned = (
            " Remove the variable_partitioner, too: Keras' variables cannot hold TensorFlow's partitioned ones (a "
            "ShardedVariable has no handle), so each variable, a large embedding, too, is whole on one ps."
        )
    raise StrategyError(
        f"Keras 3 cannot train under this strategy: its fit fails at the first step. Received: a {name}. Expected "
        "none: kdist does the same over the same TF_CONFIG. Fix: use `with kdist.scope():` instead, and remove "
        f"the line that makes it.{partitioned}"
    )
