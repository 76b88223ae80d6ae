"""The scopes that `kdist.scope` opens: of one process, of several ranks, of TensorFlow's own strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kdist import _arguments
from kdist._arguments import AUTO_STALL_TIMEOUT
from kdist._engine import open_engine, set_stall_timeout
from kdist.cluster.info import ClusterInfo
from kdist.cluster.own_rank import take_rank
from kdist.errors import ScopeError, StrategyError
from kdist.reports.log import once, show_log, warnings_at_users_lines
from kdist.reports.scope_marks import own_scopes
from kdist.strategies.options import TPU, AllReduce, ParameterServer
from kdist.strategies.selection import Selection
from kdist.watch.failure_detector import StallTimeout

if TYPE_CHECKING:
    import tensorflow as tf

    from kdist.engines.engine import Engine
    from kdist.parameter_server.chief import Chief
    from kdist.parameter_server.connection import Cluster
    from kdist.parameter_server.evaluator import Evaluator
    from kdist.strategies.all_reduce import AllReduceStrategy
    from kdist.strategies.settings import Settings

logger = logging.getLogger("kdist")


@dataclasses.dataclass
class _State:
    """The strategies that the scopes of this process share."""

    strategy: AllReduceStrategy | None = None
    task: tuple[Cluster, str, int] | None = None
    role: Chief | Evaluator | None = None
    tensorflow_strategies: dict[Any, tf.distribute.Strategy] = dataclasses.field(default_factory=dict)


_state = _State()


def default_strategy(info: ClusterInfo) -> tf.distribute.Strategy:
    """Returns TensorFlow's default strategy, with which Keras runs its own code."""
    import tensorflow as tf

    if info.local_size > 1:
        from kdist.strategies.devices import configure_devices

        configure_devices(info.local_rank, info.local_size, os.environ)
    return tf.distribute.get_strategy()


def tensorflow_strategy(info: ClusterInfo, selection: Selection, asked: Any) -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy for several replicas in this process, which the first call makes."""
    show_log(info)
    options = asked if isinstance(asked, TPU) else TPU()
    resolver = options.resolver or info.tpu_name or "local"
    key = selection.strategy if selection.strategy == "mirrored" else resolver
    if key not in _state.tensorflow_strategies:
        if selection.strategy == "mirrored":
            _state.tensorflow_strategies[key] = _mirrored_strategy()
        else:
            from kdist.tf_strategies.tpu import tpu_strategy

            # A TPU that is initialised again loses its state.
            _state.tensorflow_strategies[key] = tpu_strategy(resolver, options.timeout)
    strategy = _state.tensorflow_strategies[key]
    once.info(
        f"{strategy.num_replicas_in_sync} replicas train in this process by TensorFlow's {type(strategy).__name__}: "
        f"{selection.why}"
    )
    return strategy


def _mirrored_strategy() -> tf.distribute.MirroredStrategy:
    """Returns a strategy with a replica on each GPU, or without GPUs on each logical CPU device.

    Logical CPU devices are for tests: `tf.config.set_logical_device_configuration` makes several of one CPU.
    """
    import tensorflow as tf

    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy([f"/device:{device.device_type}:{i}" for i, device in enumerate(devices)])


@contextlib.contextmanager
def passed_through(strategy: tf.distribute.Strategy, chosen: Mapping[str, Any]) -> Iterator[tf.distribute.Strategy]:
    """Opens the scope of a strategy that is not kdist's; scales batch and learning rate with its replicas if asked."""
    from kdist.keras_hooks.clear_session import scopes_outlive_clear_session
    from kdist.strategies.settings import Settings
    from kdist.tf_strategies.session import scaled_models

    settings = Settings(chosen["scale_batch"], chosen["scale_lr"], chosen["warmup_epochs"])
    with scopes_outlive_clear_session(), strategy.scope(), scaled_models(settings, strategy.num_replicas_in_sync):
        yield strategy


@contextlib.contextmanager
def all_reduce(
    info: ClusterInfo, selection: Selection, chosen: Mapping[str, Any], *, is_plain: bool
) -> Iterator[tf.distribute.Strategy]:
    """Opens the scope of several ranks; where there is one, which trains as without kdist, that of one process."""
    import kdist.trainer.replicated_model  # noqa: F401  # before the ranks meet: imports take seconds, or fail
    from kdist.reports import failure

    show_log(info)
    asked = chosen["strategy"]
    options = asked if isinstance(asked, AllReduce) else AllReduce()
    own_scopes.waits_for_others()
    engine = open_engine(info, selection.strategy, options.start_timeout)
    if engine.size == 1 and is_plain:
        yield default_strategy(info)
        return
    if engine.size == 1:  # which has all of each part
        options = dataclasses.replace(options, shard=None, shard_embeddings=None)
    seconds = chosen["stall_timeout"]
    set_stall_timeout(StallTimeout(AUTO_STALL_TIMEOUT) if seconds == "auto" else StallTimeout(seconds, is_strict=True))
    settings = _settings(chosen, options)
    seed = _agree(engine, settings)
    _log_ranks(engine, info, selection)
    strategy = _strategy_of(engine, seed)
    with _trained_by(strategy, settings, seed):
        strategy.settings = settings
        try:
            yield strategy
        except SystemExit as error:
            if failure.exit_code(error):
                # Python calls no hook for it, and the handlers at exit would wait for the other ranks.
                failure.install(engine.abort, engine.rank, engine.size)(type(error), error, error.__traceback__)
            raise
        finally:
            strategy.settings = None


def _settings(chosen: Mapping[str, Any], options: AllReduce) -> Settings:
    """Returns what the scope was asked to do."""
    from kdist.strategies.settings import Settings

    scale_lr = chosen["scale_lr"]
    if options.sync_every > 1 and scale_lr == "auto":
        scale_lr = 1.0  # a local step is on the rank's own batch; schedules are still fitted to the epochs
    number = chosen["micro_batches"]
    return Settings(
        chosen["scale_batch"],
        scale_lr,
        chosen["warmup_epochs"],
        chosen["auto_shard"],
        options,
        micro_batches=None if number is None else int(number),  # it may be NumPy's, and goes into checkpoints
    )


def _agree(engine: Engine, settings: Settings) -> int:
    """Compares the settings of the ranks, makes their random states equal, and returns a seed of these.

    Collective: every rank must call this, in the same order.
    """
    from kdist.state.comparison import check_agreement
    from kdist.state.random_state import agree_global_seeds, agree_random_state, input_seed

    check_agreement(engine, "kdist.scope", {name: repr(value) for name, value in settings.values().items()})
    agree_random_state(engine)
    agree_global_seeds(engine)
    return input_seed(repr(random.getstate()), 0)


def _log_ranks(engine: Engine, info: ClusterInfo, selection: Selection) -> None:
    """Logs who trains together, and in the first scope the ranks' processes, and what their cores are lacking.

    Collective: every rank must call this, in the same order.
    """
    from kdist.cluster.cores import own_cores, remark_on_cores, remark_on_threads
    from kdist.strategies.devices import own_threads

    if engine.size == 1:
        return
    if engine.rank == 0:
        once.info(f"{engine.size} ranks train together over {engine.name}, {selection.why}")
        logger.debug("the launcher's variables: %s", info.reason)
    if _state.strategy is None:
        gathered = engine.gather_objects([os.getpid(), own_cores(), own_threads(os.environ)])
        processes, cores, threads = zip(*gathered, strict=True)
        named = (f"rank {rank}: {process} on {cores[rank][0]}" for rank, process in enumerate(processes))
        logger.debug("process ids: %s", "; ".join(named))
        remark = remark_on_cores(cores, engine.local_size)
        if engine.rank == 0 and remark and not own_scopes.crowd_is_known:
            once.info(remark)
        if engine.rank == 0 and (warning := remark_on_threads(threads)):
            once.warning(warning)


def _strategy_of(engine: Engine, seed: int) -> AllReduceStrategy:
    """Returns the strategy of all scopes over an engine: TensorFlow refuses models of one strategy under another.

    Collective: every rank must call this, in the same order.
    """
    from kdist.data.make_source import split_dataset
    from kdist.state.random_state import AgreedDraws
    from kdist.strategies.all_reduce import AllReduceStrategy

    if _state.strategy is None or _state.strategy.engine is not engine:
        _state.strategy = AllReduceStrategy(engine, split_dataset(engine, seed))
        _state.strategy.draws = AgreedDraws(seed)
    _state.strategy.draws.agree(engine, "kdist.scope()", with_states=False)
    return _state.strategy


@contextlib.contextmanager
def _trained_by(strategy: AllReduceStrategy, settings: Settings, seed: int) -> Iterator[None]:
    """A context in which models are made and trained under a strategy."""
    import keras

    from kdist.data.pipelines.eager_order import one_order
    from kdist.keras_hooks.clear_session import scopes_outlive_clear_session
    from kdist.keras_hooks.trainer import is_overridden, watch_models
    from kdist.keras_hooks.tuner import JointSearches
    from kdist.sharding.embedding import tables_in_parts
    from kdist.trainer.custom_loops import CustomLoops
    from kdist.trainer.downloads import once_a_host
    from kdist.trainer.replicated_model import replicate
    from kdist.trainer.saving import whole_files

    searches = JointSearches(strategy.engine)

    def silence_other_ranks() -> None:
        if strategy.engine.rank:
            keras.config.disable_interactive_logging()  # only the chief shows a progress bar

    def adopt(model: keras.Model, method: str) -> None:
        if is_overridden(model, method):
            raise ScopeError(
                "A model made outside of kdist.scope() cannot be distributed. Received: "
                f"{type(model).__name__}.{method}, which the class overrides. Expected the model to be made inside. "
                "Fix: move the line that makes it into the scope."
            )
        replicate(model, strategy, settings)

    def made(model: keras.Model) -> None:
        searches.prepare()  # a tuner that is imported in the scope makes a model before it writes
        replicate(model, strategy, settings)

    with (
        warnings_at_users_lines(),
        scopes_outlive_clear_session(silence_other_ranks),
        strategy.scope(),
        watch_models(made, adopt),
        CustomLoops(strategy).opened(),
        tables_in_parts(strategy, settings.options.shard_embeddings),
        strategy.draws.running(),
        one_order(seed) if settings.auto_shard else contextlib.nullcontext(),
        whole_files(strategy),
        once_a_host(),
        searches,
    ):
        searches.prepare()
        yield


@contextlib.contextmanager
def parameter_server(info: ClusterInfo, asked: Any, chosen: Mapping[str, Any]) -> Iterator[tf.distribute.Strategy]:
    """Opens the scope of the chief or an evaluator; a worker or ps runs its server here, then exits."""
    from kdist.keras_hooks.clear_session import scopes_outlive_clear_session
    from kdist.parameter_server.roles import check_number_of_ps, find_role, take_role

    options = asked if isinstance(asked, ParameterServer) else ParameterServer()
    if chosen["scale_lr"] not in ("auto", None):
        raise StrategyError(
            f"The learning rate cannot be scaled in asynchronous training. Received: scale_lr={chosen['scale_lr']!r}. "
            "Expected 'auto' or None. Fix: remove scale_lr."
        )
    show_log(info)
    unused = _arguments.changed(chosen, ("warmup_epochs", "auto_shard", "stall_timeout"))
    if unused and info.is_chief:
        logger.warning("parameter-server training ignores %s: see kdist.ParameterServer", ", ".join(unused))
    if _state.task is None:  # the others, which have met by MPI, serve since
        _state.task = find_role(info, options, lambda: open_engine(info, "mpi", for_parameter_server=True))
    cluster, job, index = _state.task
    check_number_of_ps(cluster, options)
    if _state.role is None:
        take_rank(info, os.environ)
        _state.role = take_role(cluster, job, index, info=info, options=options)
    with scopes_outlive_clear_session(), _state.role.scope(options) as strategy:
        yield strategy
