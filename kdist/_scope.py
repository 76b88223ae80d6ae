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

from kdist._process import cluster_info, open_engine
from kdist.cluster.info import ClusterInfo
from kdist.errors import ScopeError, StrategyError
from kdist.strategies.choice import WORDS, Choice, choose

if TYPE_CHECKING:
    import tensorflow as tf

    from kdist.strategies.all_reduce import AllReduceStrategy

logger = logging.getLogger("kdist")


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Synchronous data parallelism, with options of its own, to be given as `kdist.scope(strategy=...)`.

    Args:
        engine: str, how the ranks talk to each other: `"auto"` (what the launcher implies) or `"mpi"`.

    Example:
    ```python
    with kdist.scope(kdist.AllReduce(engine="mpi")):
        ...
    ```
    """

    engine: str = "auto"


@contextlib.contextmanager
def scope(
    strategy: str | AllReduce | tf.distribute.Strategy = "auto",
    *,
    scale_batch: bool = True,
    scale_lr: str | float | None = "auto",
    warmup_epochs: str | float = "auto",
    auto_shard: bool = True,
) -> Iterator[tf.distribute.Strategy]:
    """Makes the Keras models inside train on all processes of the job exactly as on one.

    In one process nothing changes: models run Keras' own code. Among several, models made or used in the scope are
    trained by synchronous data parallelism; a model made in the scope stays so after the scope is left.

    Each argument has an environment variable (`KDIST_STRATEGY`, `KDIST_SCALE_BATCH`, `KDIST_SCALE_LR`,
    `KDIST_WARMUP_EPOCHS`, `KDIST_AUTO_SHARD`), with which a launch can choose what the code leaves open.

    Collective: every rank must call this, in the same order.

    Args:
        strategy: `"auto"` (what the launcher implies), `"single"` (no distribution: among N ranks, N independent
            trainings), `"mpi"`, an `AllReduce`, or your own `tf.distribute.Strategy`, which is entered as it is.
        scale_batch: bool, whether `batch_size` is what each replica sees, so that the global batch grows with the
            replicas. If `False`, each batch is split over them.
        scale_lr: how the learning rate follows a global batch that grew: `"auto"` (linear for SGD, square root for
            adaptive optimizers), `"linear"`, `"sqrt"`, a number to multiply by, or `None` to leave it.
        warmup_epochs: a number of epochs over which the learning rate reaches its multiple, or `"auto"`: 5 or a tenth
            of the run, whichever is shorter.
        auto_shard: bool, whether kdist shares the data out among the ranks. If `False`, each rank's input is its own.

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
    }
    chosen = _with_environment(given, os.environ)
    _check_settings(chosen)
    _check_backend(os.environ)
    with _only_one_open():
        wanted = chosen["strategy"]
        if not isinstance(wanted, (str, AllReduce)):
            with wanted.scope():
                yield wanted
            return
        info = cluster_info()
        choice = choose(wanted.engine if isinstance(wanted, AllReduce) else wanted, info)
        if choice.strategy == "single":
            yield _default_strategy(info)
            return
        with _all_reduce(info, choice, chosen) as replicated:
            yield replicated


# How an environment variable's text becomes each argument's value.
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def _number_or_word(text: str) -> str | float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _with_environment(given: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Fills what the code leaves open from the launch's `KDIST_*` variables; refuses a contradiction."""
    defaults = {
        "strategy": "auto",
        "scale_batch": True,
        "scale_lr": "auto",
        "warmup_epochs": "auto",
        "auto_shard": True,
    }
    chosen = dict(given)
    for name, default in defaults.items():
        variable = f"KDIST_{name.upper()}"
        if variable not in env:
            continue
        text = env[variable]
        value: Any = text
        if isinstance(default, bool):
            if text.lower() not in _BOOLEANS:
                raise StrategyError(
                    f"{variable} is not understood. Received: {variable}={text!r}. Expected 0, 1, true or false. "
                    "Fix: set one of these, or unset it."
                )
            value = _BOOLEANS[text.lower()]
        elif name != "strategy":
            value = _number_or_word(text)
        if given[name] not in (default, value):
            raise ScopeError(
                f"The launch contradicts the code. Received: {variable}={text!r} and "
                f"kdist.scope({name}={given[name]!r}). Expected at most one of them, or the same in both. "
                f"Fix: unset {variable}, or leave {name} out of the code."
            )
        chosen[name] = value
    return chosen


def _check_settings(chosen: Mapping[str, Any]) -> None:
    strategy = chosen["strategy"]
    if isinstance(strategy, AllReduce) and strategy.engine not in ("auto", "mpi"):
        raise StrategyError(
            f"Unknown engine. Received: AllReduce(engine={strategy.engine!r}). Expected 'auto' or 'mpi'. "
            "Fix: choose one."
        )
    if not isinstance(strategy, (str, AllReduce)) and not hasattr(strategy, "extended"):
        raise StrategyError(
            f"`strategy` is of no known kind. Received: strategy={strategy!r} of type {type(strategy).__name__}. "
            f"Expected one of {', '.join(map(repr, WORDS))}, a kdist.AllReduce or a tf.distribute.Strategy. "
            "Fix: choose one of these."
        )
    from kdist.scaling import learning_rate_rule, num_warmup_steps

    try:
        learning_rate_rule(chosen["scale_lr"], "SGD", 2, scale_batch=True)
        num_warmup_steps(chosen["warmup_epochs"], 1, 1)
    except ValueError as error:
        raise StrategyError(str(error)) from error


def _check_backend(env: Mapping[str, str]) -> None:
    import keras

    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ScopeError(
            f"kdist trains on Keras' TensorFlow backend. Received: the backend {backend!r} "
            f"(KERAS_BACKEND={env.get('KERAS_BACKEND', 'unset')}). Expected 'tensorflow'. "
            "Fix: KERAS_BACKEND=tensorflow, or keras.distribution for JAX."
        )


@dataclasses.dataclass
class _Door:
    """Whether a scope of this process is open, and the strategy that all its scopes share."""

    is_open: bool = False
    strategy: AllReduceStrategy | None = None


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
    from kdist.strategies.devices import take_devices
    from kdist.training import _keras_internals as internals
    from kdist.training.replicated_model import Settings, replicate
    from kdist.training.sources import split_dataset
    from kdist.training.state import agree_random_state, check_agreement

    _show_log(info)
    engine = open_engine(info, choice.strategy)
    take_devices(engine.local_rank, engine.local_size, os.environ)
    if engine.size == 1:
        yield _default_strategy(info)
        return
    settings = Settings(**{key: value for key, value in chosen.items() if key != "strategy"})
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
        try:
            yield strategy
        except SystemExit as error:
            if failure.exit_code(error):
                # Python calls no hook for it, and on its way out this rank would wait for the others, and they for it.
                failure.install(engine.abort, engine.rank, engine.size)(type(error), error, error.__traceback__)
            raise


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
