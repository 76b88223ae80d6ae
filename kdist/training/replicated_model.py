"""A Keras model whose verbs and steps work on this rank's share of the data.

The model stays the user's: nothing is changed but a few methods on the instance, which do what is missing around
Keras' own and call them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.data.shard import Shard
from kdist.scaling import learning_rate_rule
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.training import _keras_internals as internals
from kdist.training import state
from kdist.training.agreement import with_agreement
from kdist.training.arguments import comparable, like, named_arguments
from kdist.training.epoch_iterator import ShardedEpochIterator, SourceAdapter
from kdist.training.learning_rate import EffectiveRate, innermost
from kdist.training.logs import flat_logs, mean_logs
from kdist.training.metrics import add_over_ranks
from kdist.training.sources import describe_source, holds_random_state, make_source, split_batch
from kdist.training.step import Step, TrainStep, optimizers_of

logger = logging.getLogger("kdist")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a scope was asked to do with the models made in it.

    Attributes:
        scale_batch: bool, whether `batch_size` is what each replica sees.
        scale_lr: `"auto"`, `"linear"`, `"sqrt"`, a number or `None`.
        warmup_epochs: `"auto"` or a number of epochs.
        auto_shard: bool, whether kdist shares the data out.
    """

    scale_batch: bool = True
    scale_lr: str | float | None = "auto"
    warmup_epochs: str | float = "auto"
    auto_shard: bool = True


def replicate(model: keras.Model, strategy: AllReduceStrategy, settings: Settings) -> None:
    """Makes a model's verbs work on this rank's share of the data. Doing it twice does nothing.

    Args:
        model: `keras.Model`, built or not, compiled or not.
        strategy: `AllReduceStrategy` of several ranks.
        settings: `Settings` of the scope.
    """
    if "_kdist" in model.__dict__:
        return
    internals.set_strategy(model, strategy)
    # Functions of an earlier use hold the class's own steps.
    model.train_function = model.test_function = model.predict_function = None
    ReplicatedModel(model, strategy, settings).install()


class ReplicatedModel:
    """What kdist keeps beside one model.

    Args:
        model: `keras.Model`.
        strategy: `AllReduceStrategy`.
        settings: `Settings` of the scope.
    """

    def __init__(self, model: keras.Model, strategy: AllReduceStrategy, settings: Settings) -> None:
        self.model = model
        self.strategy = strategy
        self.engine = strategy.engine
        self.settings = settings
        self._verbs: list[str] = []
        self._rates: dict[int, EffectiveRate] = {}
        self._pass_start: dict[int, tf.Tensor] = {}
        self._holds_random_state = False
        self._num_sources = 0
        self._warned_of_jit = False
        self._on_batch_ready: set[tuple[str, int]] = set()
        self.stop_is_agreed = False
        with tf.init_scope():
            self.stop_requested = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="kdist_stop_requested")

    def install(self) -> None:
        """Puts the wrappers on the instance, in front of what its class says."""
        wrappers: dict[str, Callable[..., Any]] = {
            "fit": functools.partial(self._verb, "fit"),
            "evaluate": functools.partial(self._verb, "evaluate"),
            "predict": functools.partial(self._verb, "predict"),
            "train_on_batch": functools.partial(self._verb_on_batch, "train_on_batch"),
            "test_on_batch": functools.partial(self._verb_on_batch, "test_on_batch"),
            "predict_on_batch": functools.partial(self._verb_on_batch, "predict_on_batch"),
            "train_step": self.train_step,
            "test_step": self.test_step,
            "predict_step": self.predict_step,
            "_maybe_symbolic_build": self._maybe_symbolic_build,
        }
        for name, wrapper in wrappers.items():
            self.model.__dict__[name] = like(getattr(type(self.model), name), wrapper)
        self.model.__dict__["_kdist"] = self

    def _original(self, name: str) -> Callable[..., Any]:
        return getattr(type(self.model), name).__get__(self.model)

    # The verbs.

    def _verb(self, name: str, *args: Any, **kwargs: Any) -> Any:
        original = self._original(name)
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = named_arguments(bound)
        if isinstance(given.get("callbacks"), keras.callbacks.CallbackList) and self._verbs:
            with self._running(name):  # validation within fit: everything is set up
                return original(*args, **kwargs)
        is_outermost = not self._verbs
        self._agree_random_state()
        state.check_agreement(self.engine, f"the arguments of {name}", comparable(given))
        self._without_jit()
        if self.engine.rank != 0:
            given["verbose"] = 0
        with (
            with_agreement(given.get("callbacks"), self, name, is_outermost) as given["callbacks"],
            self._running(name),
            internals.epoch_iterators(self._make_iterator, self.strategy),
        ):
            try:
                return original(*bound.args, **bound.kwargs)
            finally:
                if is_outermost:
                    self._holds_random_state = False

    def _verb_on_batch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # The first call on each compiled state sets up what the other verbs set up at every call.
        key = (name, id(getattr(self.model, "optimizer", None)))
        if key not in self._on_batch_ready:
            self._agree_random_state()
            self._without_jit()
        with self._running(name):
            result = self._original(name)(*args, **kwargs)
        if key not in self._on_batch_ready and name == "train_on_batch":
            state.check_equal(self.engine, {v.path: v for v in self.model.trainable_variables})
        self._on_batch_ready.add(key)
        return result

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[None]:
        self._verbs.append(name)
        try:
            yield
        finally:
            self._verbs.pop()

    def _without_jit(self) -> None:
        if self.model.jit_compile:
            self.model.jit_compile = False
            if not self._warned_of_jit and self.engine.rank == 0:
                self._warned_of_jit = True
                logger.warning(
                    "jit_compile=True is off for this model: XLA cannot compile the reduction over %d ranks.",
                    self.engine.size,
                )

    # Data.

    def _make_iterator(
        self,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool | str = False,
        class_weight: Any = None,
        distribute_strategy: Any = None,
        steps_per_execution: int = 1,
    ) -> ShardedEpochIterator:
        adapter = internals.get_data_adapter(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        source = make_source(
            adapter,
            self.engine,
            scale_batch=self.settings.scale_batch,
            auto_shard=self.settings.auto_shard,
            seed=self._next_seed(),
            steps_per_epoch=steps_per_epoch,
        )
        state.check_agreement(self.engine, f"the data given to {self._verbs[-1]}", describe_source(source))
        if holds_random_state(source) and self._verbs[-1] == "fit":
            self._holds_random_state = True
        return ShardedEpochIterator(
            SourceAdapter(source, self._agree_random_state),
            strategy=distribute_strategy,
            steps_per_epoch=source.plan.job_steps_per_epoch,
            steps_per_execution=steps_per_execution,
            begin_pass=self._begin_pass,
            end_pass=self._end_pass,
            is_chief=self.engine.rank == 0,
        )

    def _next_seed(self) -> int:
        """Returns the base of the next input's orders: equal on all ranks, another at each call.

        It follows from Python's random state, which `keras.utils.set_random_seed` sets, and takes nothing from it: what
        the user's script draws later, the weights of the next model say, stays what it is in one process.
        """
        self._num_sources += 1
        text = f"{random.getstate()} {self._num_sources}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)

    def _agree_random_state(self) -> None:
        # A generator draws ahead in a thread of its own: what it draws from must not change under it.
        if not self._holds_random_state:
            state.agree_random_state(self.engine)

    def _begin_pass(self) -> None:
        if self._verbs[-1] != "predict":
            self._note_metrics()

    def _end_pass(self) -> None:
        if self._verbs[-1] == "predict":
            return
        variables = self.model.metrics_variables
        before = [self._pass_start.get(id(v), tf.zeros_like(v.value)) for v in variables]
        add_over_ranks(self.engine, variables, before)
        self._note_metrics()  # an evaluation within an epoch: what follows is added to what all ranks have now
        if self._verbs[-1] == "fit":
            self.agree_to_stop()

    def _note_metrics(self) -> None:
        self._pass_start = {id(v): tf.identity(v.value) for v in self.model.metrics_variables}

    def agree_to_stop(self) -> None:
        """Makes all ranks stop training if one of them asks to.

        Collective: every rank must call this, in the same order.
        """
        asks = bool(self.model.stop_training) or bool(self.stop_requested > 0)
        (total,) = self.engine.allreduce([tf.constant(int(asks), tf.int32)])
        self.model.stop_training = bool(total > 0)
        self.forget_stop()

    def forget_stop(self) -> None:
        """Withdraws this rank's wish to stop, and what was agreed."""
        self.stop_requested.assign(0.0)
        self.stop_is_agreed = False

    def _note_stop(self) -> None:
        self.stop_is_agreed = True

    # State.

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, ShardedEpochIterator):
            data_batch, iterator = iterator.batch_to_build_on(), None
        for optimizer in optimizers_of(self.model):
            # Made outside of the scope, it would not let its slots be made here.
            internals.set_optimizer_strategy(optimizer, self.strategy)
        try:
            self._original("_maybe_symbolic_build")(iterator=iterator, data_batch=data_batch)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            # Without a strategy Keras would not call the model here: what has steps of its own may not be callable.
            if not internals.has_own_steps(self.model):
                raise
        name = self._verbs[-1] if self._verbs else ""
        if (
            name.endswith("_on_batch")
            and (name, id(getattr(self.model, "optimizer", None))) not in self._on_batch_ready
        ):
            self.enter(name)

    def enter(self, verb: str) -> None:
        """Compares the model over the ranks and gives all of them the root's state.

        Collective: every rank must call this, in the same order.

        Args:
            verb: str, what begins, for messages.
        """
        model = self.model
        optimizers = optimizers_of(model)
        state.check_agreement(self.engine, f"the model given to {verb}", state.describe_model(model))
        variables = {id(v): v for v in [*model.variables, *(v for o in optimizers for v in o.variables)]}
        for generator in internals.seed_generators(model):
            variables.setdefault(id(generator.state), generator.state)
        state.broadcast_state(self.engine, list(variables.values()))
        if verb == "fit":
            model._initial_epoch = self.engine.broadcast_object(model._initial_epoch)

    def rate_of(self, optimizer: keras.optimizers.Optimizer) -> EffectiveRate:
        """Returns the effective rate of an innermost optimizer, made when it is first asked for."""
        if id(optimizer) not in self._rates or self._rates[id(optimizer)].optimizer is not optimizer:
            settings, size = self.settings, self.engine.size
            rule = learning_rate_rule(
                settings.scale_lr, type(optimizer).__name__, size, scale_batch=settings.scale_batch
            )
            # With a larger global batch an epoch has fewer steps: a schedule is to cover it all the same.
            stretch = float(size) if settings.scale_batch and settings.scale_lr is not None else 1.0
            held = {id(innermost(each)) for each in optimizers_of(self.model)}
            self._rates = {key: rate for key, rate in self._rates.items() if key in held}  # not those of old compiles
            with tf.init_scope():
                self._rates[id(optimizer)] = EffectiveRate(optimizer, rule, stretch)
        return self._rates[id(optimizer)]

    def rates(self) -> list[EffectiveRate]:
        """Returns the effective rates of the model's optimizers."""
        return [self.rate_of(innermost(optimizer)) for optimizer in optimizers_of(self.model)]

    # The steps: traced once, or run at every step in eager mode.

    def train_step(self, data: Any) -> Any:
        """Trains on this rank's share; the weights are the same on all ranks afterwards."""
        if self.strategy.extended.step is not None:
            return self._original("train_step")(data)  # called by another model's step, which has the share already
        is_shard = isinstance(data, Shard)
        step = TrainStep(
            self.strategy.extended,
            data if is_shard else split_batch(data, self.engine),
            rate_of=self.rate_of,
            scaled=is_shard,
            stop_requested=self.stop_requested,
            on_stop_agreed=self._note_stop,
        )
        return self._measured_step("train_step", step, alone=not is_shard)

    def test_step(self, data: Any) -> Any:
        """Evaluates this rank's share."""
        if self.strategy.extended.step is not None:
            return self._original("test_step")(data)
        is_shard = isinstance(data, Shard)
        step = Step(self.strategy.extended, data if is_shard else split_batch(data, self.engine))
        return self._measured_step("test_step", step, alone=not is_shard)

    def _measured_step(self, name: str, step: Step, *, alone: bool) -> Any:
        """Runs a step that writes metrics.

        Args:
            name: str, the model's method.
            step: `Step`.
            alone: bool, whether nobody adds the metrics later: the batch is all there is.
        """
        model = self.model
        variables = model.metrics_variables
        before = [tf.identity(v.value) for v in variables]
        arrived = [leaf for leaf in tf.nest.flatten(step.data, expand_composites=True) if tf.is_tensor(leaf)]
        # At the end of data of unknown length nothing of one more step may run, not even what needs no data: the count
        # of iterations, weight decay. (In plain Keras they may.)
        with step.running(model), tf.control_dependencies(arrived):
            logs = flat_logs(self._original(name)(step.data))
            is_metrics = isinstance(logs, dict) and set(logs) == set(model.get_metrics_result())
            if not is_metrics:
                logs = mean_logs(logs, step)

        def undo() -> None:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

        tf.cond(step.active, lambda: None, undo)
        if alone:
            add_over_ranks(self.engine, variables, before)
            if is_metrics:
                logs = model.get_metrics_result()
        return logs

    def predict_step(self, data: Any) -> Any:
        """Predicts this rank's share and returns all ranks' predictions, in the order of the rows."""
        if self.strategy.extended.step is not None:
            return self._original("predict_step")(data)
        shard = data if isinstance(data, Shard) else split_batch(data, self.engine)
        step = Step(self.strategy.extended, shard)
        with step.running(self.model):
            outputs = self._original("predict_step")(step.data)
        leaves = [output[: tf.cast(step.rows, tf.int32)] for output in keras.tree.flatten(outputs)]
        return keras.tree.pack_sequence_as(outputs, self.engine.allgather(leaves))
