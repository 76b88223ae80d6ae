"""The front door: cluster -> strategy -> scope.

Not `scope.py`: a module of that name would hide `kdist.scope`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kdist import _arguments
from kdist._arguments import STALL_TIMEOUT
from kdist._process import choice_for, cluster_info, open_engine, set_stall_timeout
from kdist.cluster.info import ClusterInfo
from kdist.errors import ScopeError, StrategyError
from kdist.strategies.choice import PARAMETER_SERVER, PASSED_THROUGH, Choice
from kdist.strategies.options import TPU, AllReduce, ParameterServer

if TYPE_CHECKING:
    import tensorflow as tf

    from kdist.strategies.all_reduce import AllReduceStrategy
    from kdist.training.evaluator import Evaluator
    from kdist.training.roles import Leader

logger = logging.getLogger("kdist")


@contextlib.contextmanager
def scope(
    strategy: str | AllReduce | ParameterServer | TPU | tf.distribute.Strategy = "auto",
    *,
    scale_batch: bool = True,
    scale_lr: str | float | None = "auto",
    warmup_epochs: str | float = "auto",
    auto_shard: bool = True,
    stall_timeout: float | None = STALL_TIMEOUT,
) -> Iterator[tf.distribute.Strategy]:
    """Makes the Keras models inside train on all processes of the job exactly as on one.

    In one process nothing changes: models run Keras' own code. Among several, models made or used in the scope are
    trained by synchronous data parallelism; a model made in the scope stays so after the scope is left.

    Each argument has an environment variable (`KDIST_STRATEGY`, `KDIST_SCALE_BATCH`, `KDIST_SCALE_LR`,
    `KDIST_WARMUP_EPOCHS`, `KDIST_AUTO_SHARD`, `KDIST_STALL_TIMEOUT`), with which a launch can choose what the code
    leaves open.

    Collective: every rank must call this, in the same order.

    Args:
        strategy: `"auto"` (what the launcher implies), `"single"` (no distribution: among N ranks, N independent
            trainings), `"mpi"`, `"horovod"`, `"collective"` (synchronous, over that engine), `"parameter_server"`,
            `"mirrored"` (several devices of one process), `"tpu"`, an `AllReduce`, a `ParameterServer`, a `TPU`, or
            your own
            `tf.distribute.Strategy`, which is entered as it is.
        scale_batch: bool, whether `batch_size` is what each replica sees, so that the global batch grows with the
            replicas. If `False`, each batch is split over them.
        scale_lr: how the learning rate follows a global batch that grew: `"auto"` (linear for SGD, square root for
            adaptive optimizers), `"linear"`, `"sqrt"`, a number to multiply by, or `None` to leave it.
        warmup_epochs: a number of epochs over which the learning rate reaches its multiple, or `"auto"`: 5 or a tenth
            of the run, whichever is shorter.
        auto_shard: bool, whether kdist shares the data out among the ranks. If `False`, each rank's input is its own.
        stall_timeout: float or `None`, seconds for which a rank may keep the others waiting before the job is ended
            with a message that names it; `None` for ever. A rank that computes, or is in your own code (a callback,
            or between `fit` and `fit`), is only warned about, unless you set this.

    Returns:
        A context manager, which gives the `tf.distribute.Strategy` that is at work.

    Raises:
        ClusterError: if the launcher's variables contradict each other, or the engine.
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
    }
    chosen = _arguments.with_environment(given, os.environ)
    _arguments.check(chosen, os.environ)
    with _only_one_open():
        wanted = chosen["strategy"]
        if not isinstance(wanted, (str, AllReduce, ParameterServer, TPU)):
            _refuse_multi_worker(wanted)
            if chosen["scale_lr"] in ("auto", None):  # its own conventions hold, unless scaling is asked for
                chosen.update(scale_batch=False, scale_lr=None)
            with _passed_through(wanted, chosen):
                yield wanted
            return
        info = cluster_info()
        for name, meant in _arguments.misspelt(os.environ).items() if info.is_chief else ():
            logger.warning("%s is set and means nothing to kdist; %s is what it reads", name, meant)
        word = wanted if isinstance(wanted, str) else wanted.word
        choice = choice_for(word, info, is_synchronous=isinstance(wanted, AllReduce))
        if choice.strategy == "single":
            yield _default_strategy(info)
            return
        if choice.strategy == PARAMETER_SERVER:
            with _parameter_server(info, wanted, chosen) as asynchronous:
                yield asynchronous
            return
        if choice.strategy in PASSED_THROUGH:
            with _passed_through(_theirs(info, choice, wanted), chosen) as theirs:
                yield theirs
            return
        with _all_reduce(info, choice, chosen) as replicated:
            yield replicated


@dataclasses.dataclass
class _Door:
    """Whether a scope of this process is open, and the strategy that all its scopes share."""

    is_open: bool = False
    strategy: AllReduceStrategy | None = None
    role: Leader | Evaluator | None = None
    theirs: dict[Any, tf.distribute.Strategy] = dataclasses.field(default_factory=dict)


_door = _Door()


@contextlib.contextmanager
def _only_one_open() -> Iterator[None]:
    if _door.is_open:
        raise ScopeError(
            "A kdist scope is open already. Received: kdist.scope() inside of kdist.scope(). Expected one at a time; "
            "they may follow each other. Fix: leave the first one before, or take the inner one out."
        )
    _door.is_open = True
    try:
        yield
    finally:
        _door.is_open = False


def _theirs(info: ClusterInfo, choice: Choice, wanted: Any) -> tf.distribute.Strategy:
    """Returns TensorFlow's own strategy for several replicas in this process, made by the first call."""
    _show_log(info)
    resolver = (wanted.resolver if isinstance(wanted, TPU) else None) or info.tpu_name or "local"
    key = choice.strategy if choice.strategy == "mirrored" else resolver
    if key not in _door.theirs:
        if choice.strategy == "mirrored":
            from kdist.strategies.mirrored import mirrored_strategy

            _door.theirs[key] = mirrored_strategy()
        else:
            from kdist.strategies.tpu import tpu_strategy

            # To initialise a TPU again would end what runs on it.
            _door.theirs[key] = tpu_strategy(resolver, wanted.timeout if isinstance(wanted, TPU) else TPU().timeout)
    strategy = _door.theirs[key]
    logger.info(
        "%d replicas train in this process by TensorFlow's own %s: %s",
        strategy.num_replicas_in_sync, type(strategy).__name__, choice.why,
    )  # fmt: skip
    return strategy


@contextlib.contextmanager
def _passed_through(strategy: tf.distribute.Strategy, chosen: Mapping[str, Any]) -> Iterator[tf.distribute.Strategy]:
    """Enters a strategy that is not kdist's; batch and learning rate follow its replicas, if they are to."""
    from kdist.training.scaled_model import Scaling, scaled_models

    scaling = Scaling(strategy.num_replicas_in_sync, *(chosen[n] for n in ("scale_batch", "scale_lr", "warmup_epochs")))
    with strategy.scope(), scaled_models(scaling):
        yield strategy


def _refuse_multi_worker(strategy: tf.distribute.Strategy) -> None:
    """Refuses TensorFlow's strategies of several processes, which kdist has its own for."""
    import tensorflow as tf

    names = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy")
    name = next((name for name in names if isinstance(strategy, getattr(tf.distribute, name))), None)
    if name is None:
        return
    partitioned = ""
    if getattr(strategy.extended, "_variable_partitioner", None) is not None:
        partitioned = (
            " Leave the variable_partitioner out, too: Keras' variables cannot hold TensorFlow's partitioned ones (a "
            "ShardedVariable has no handle), so that each variable, a large embedding too, is whole on one ps."
        )
    raise StrategyError(
        f"Keras 3 does not train under this strategy: its fit ends at the first step. Received: a {name}. Expected "
        "none: kdist does the same over the same TF_CONFIG. Fix: write `with kdist.scope():` in its place, and leave "
        f"the line that makes it out.{partitioned}"
    )


def _default_strategy(info: ClusterInfo) -> tf.distribute.Strategy:
    """Returns TensorFlow's default strategy: Keras' own code path."""
    import tensorflow as tf

    if info.local_size > 1:
        from kdist.strategies.devices import take_devices

        take_devices(info.local_rank, info.local_size, os.environ)
    return tf.distribute.get_strategy()


@contextlib.contextmanager
def _all_reduce(info: ClusterInfo, choice: Choice, chosen: Mapping[str, Any]) -> Iterator[AllReduceStrategy]:
    """Opens the scope of several ranks."""
    import keras

    from kdist.launch import failure
    from kdist.strategies.all_reduce import AllReduceStrategy
    from kdist.training import _keras_internals as internals
    from kdist.training.replicated_model import replicate
    from kdist.training.settings import Settings
    from kdist.training.sources import split_dataset
    from kdist.training.state import agree_random_state, check_agreement

    _show_log(info)
    asked = chosen["strategy"]
    options = asked if isinstance(asked, AllReduce) else AllReduce()
    engine = open_engine(info, choice.strategy, options.start_timeout)
    if engine.size == 1:
        yield _default_strategy(info)
        return
    patience = chosen["stall_timeout"]
    set_stall_timeout(patience, is_strict=patience != STALL_TIMEOUT)
    kept = {key: value for key, value in chosen.items() if key not in ("strategy", "stall_timeout")}
    if options.sync_every > 1 and kept["scale_lr"] == "auto":
        kept["scale_lr"] = 1.0  # a rank's own steps are on its own batch; a schedule covers the epochs all the same
    of_the_strategy = {field.name for field in dataclasses.fields(Settings)} & set(vars(options))
    settings = Settings(**kept, **{name: getattr(options, name) for name in of_the_strategy})
    check_agreement(engine, "kdist.scope", {key: repr(value) for key, value in dataclasses.asdict(settings).items()})
    agree_random_state(engine)
    if engine.rank == 0:
        logger.info("%d ranks train together over %s: %s", engine.size, engine.name, choice.why)
    else:
        keras.config.disable_interactive_logging()  # the chief speaks
    if _door.strategy is None or _door.strategy.engine is not engine:
        # One for all scopes: TensorFlow does not let models of one strategy be used under another.
        _door.strategy = AllReduceStrategy(engine, split_dataset(engine))
    strategy = _door.strategy

    def adopt(model: keras.Model, verb: str) -> None:
        if internals.is_overridden(model, verb):
            raise ScopeError(
                f"A model made outside of kdist.scope() is used in it. Received: {type(model).__name__}.{verb}, which "
                "the class overrides, so that the model cannot be adopted. Expected the model to be made inside. "
                "Fix: move the line that makes it into the scope."
            )
        replicate(model, strategy, settings)

    with strategy.scope(), internals.watch_models(lambda model: replicate(model, strategy, settings), adopt):
        strategy.settings = settings
        try:
            yield strategy
        except SystemExit as error:
            if failure.exit_code(error):
                # Python calls no hook for it, and on its way out this rank would wait for the others, and they for it.
                failure.install(engine.abort, engine.rank, engine.size)(type(error), error, error.__traceback__)
            raise
        finally:
            strategy.settings = None


@contextlib.contextmanager
def _parameter_server(info: ClusterInfo, wanted: Any, chosen: Mapping[str, Any]) -> Iterator[tf.distribute.Strategy]:
    """Opens the scope of the chief or an evaluator; a worker or ps serves here, and leaves the script."""
    from kdist.training.roles import roles, take_role

    options = wanted if isinstance(wanted, ParameterServer) else ParameterServer()
    if chosen["scale_lr"] not in ("auto", None):
        raise StrategyError(
            f"The learning rate is not scaled in asynchronous training. Received: scale_lr={chosen['scale_lr']!r}. "
            "Expected 'auto' or None. Fix: leave scale_lr out."
        )
    _show_log(info)
    unused = _arguments.changed(chosen, ("warmup_epochs", "auto_shard", "stall_timeout"))
    if unused and info.is_chief:
        logger.warning("with parameter servers %s mean(s) nothing: see kdist.ParameterServer", ", ".join(unused))
    cluster, job, index = roles(info, options, lambda: open_engine(info, "mpi"))
    if _door.role is None:
        _door.role = take_role(cluster, job, index, info=info, options=options)
    with _door.role.scope(options) as strategy:
        yield strategy


def _show_log(info: ClusterInfo) -> None:
    """Shows what kdist logs, unless the user's own logging does: all of it on the chief, warnings elsewhere."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("[kdist] %(message)s" if info.is_chief else f"[kdist rank {info.rank}] %(message)s")
    )
    handler.setLevel(logging.INFO if info.is_chief else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
