"""A Keras model whose verbs and steps work on this rank's share of the data.

The model stays the user's: nothing is changed but a few methods on the instance, which do what is missing around
Keras' own and call them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist.data.shard import Shard
from kdist.gradients.kept_state import by_place, by_variable
from kdist.gradients.wire import Wire, compression_named
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.training import _keras_internals as internals
from kdist.training import saving, state
from kdist.training.arguments import comparable, like, named_arguments
from kdist.training.averaging import Averaging
from kdist.training.callback_list import replicated_callbacks
from kdist.training.compiled_step import CompiledSteps
from kdist.training.deferred_sums import DeferredSums
from kdist.training.epoch_iterator import ShardedEpochIterator
from kdist.training.learning_rate import EffectiveRate, EffectiveRates
from kdist.training.local_step import LocalStep
from kdist.training.logs import measured_logs
from kdist.training.metrics import MetricsOfPass, add_over_ranks, flat_metrics
from kdist.training.optimizers import optimizers_of
from kdist.training.predictions import gather_rows, restored
from kdist.training.replicated_data import ReplicatedData
from kdist.training.requests import Requests
from kdist.training.settings import Settings
from kdist.training.sources import split_batch
from kdist.training.step import Step
from kdist.training.step_function import StepFunction
from kdist.training.train_step import TrainStep

logger = logging.getLogger("kdist")


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
        self._rates = EffectiveRates(
            model, scale_lr=settings.scale_lr, scale_batch=settings.scale_batch, size=self.engine.size
        )
        self.metrics = MetricsOfPass(model, self.engine)
        self.data = ReplicatedData(model, strategy, settings, begin_pass=self._begin_pass, end_pass=self._end_pass)
        self._dense_outputs: list[bool] = []
        self._results: dict[str, dict[str, Callable[[], Any]]] = {}
        self._compiled_steps = CompiledSteps(model, self.engine)
        self._on_batch_ready: dict[str, Any] = {}  # the optimizers with which methods on a batch are set up
        self.requests = Requests(self.engine)
        self.deferred_sums = DeferredSums(model, self.engine)
        compression = compression_named(
            settings.compression, powersgd_rank=settings.powersgd_rank, topk_ratio=settings.topk_ratio
        )
        self.wire = Wire(
            self.engine,
            compression=compression,
            bucket_mb=settings.bucket_mb,
            sparse_as_dense=settings.sparse_as_dense,
        )
        self.averaging: Averaging | None = None
        if settings.sync_every > 1:
            self.averaging = Averaging(
                model,
                self.engine,
                every=settings.sync_every,
                learning_rate=settings.outer_learning_rate,
                momentum=settings.outer_momentum,
                bucket_mb=settings.bucket_mb,
            )
        self.writes = self.engine.rank == 0
        self._warned_of: list[Settings] = []

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
            "_make_function": self._make_function,
            "_maybe_symbolic_build": self._maybe_symbolic_build,
            "_get_metrics_result_or_logs": self._get_metrics_result_or_logs,
            **saving.wrappers(self),
        }
        for name, wrapper in wrappers.items():
            self.model.__dict__[name] = like(getattr(type(self.model), name), wrapper)
        self.model.__dict__["_kdist"] = self

    def _original(self, name: str) -> Callable[..., Any]:
        return getattr(type(self.model), name).__get__(self.model)

    # The verbs.

    def _verb(self, name: str, *args: Any, **kwargs: Any) -> Any:
        original = self._original(name)
        if isinstance(kwargs.get("callbacks"), keras.callbacks.CallbackList) and self._verbs:
            with self._running(name):  # validation within fit: everything is set up
                return original(*args, **kwargs)
        is_outermost = not self._verbs
        self._warn_of_other_settings()
        self._end_a_broken_pass()
        self.data.agree_random_state()
        if not is_outermost:
            self.agree()  # a callback may have loaded weights on this rank
        given = named_arguments(inspect.signature(original).bind(*args, **kwargs))
        state.check_agreement(self.engine, f"the arguments of {name}", comparable(given))
        self._compiled_steps.take_over()
        if name == "fit":
            self.give_kept({})  # it was of the weights that there were then
        with (
            self._running(name),
            self.data.of_fit() if name == "fit" else contextlib.nullcontext(),
            self.data.of_script() if is_outermost else contextlib.nullcontext(),
            replicated_callbacks(self, name, is_outermost),
            internals.epoch_iterators(self._make_iterator, self.strategy, is_chief=self.engine.rank == 0),
        ):
            result = original(*args, **kwargs)
            return restored(result, self._dense_outputs) if name == "predict" else result

    def _warn_of_other_settings(self) -> None:
        now = self.strategy.settings
        if now in (None, self.settings) or now in self._warned_of or not self.writes:
            return
        self._warned_of.append(now)
        logger.warning(
            "this model keeps the settings of the scope it was made in: %s. Fix: make it, or load it, in this scope",
            self.settings.unlike(now),
        )

    def _verb_on_batch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._end_a_broken_pass()
        # The first call on each compiled state sets up what the other verbs set up at every call.
        is_first = self._is_first_on_batch(name)
        if is_first:
            self.data.agree_random_state()
            self._compiled_steps.take_over()
            if name == "predict_on_batch":  # the others enter when Keras builds the model; here it does not
                built = self.model.built
                state.check_agreement(self.engine, f"the model given to {name}", {"whether it is built": built})
                if built:
                    self.enter(name)
        else:
            self.agree()  # a rank may have loaded weights since
        with self._running(name):
            result = self._original(name)(*args, **kwargs)
        if name == "predict_on_batch":
            result = restored(result, self._dense_outputs)
        if is_first and name == "train_on_batch":
            state.check_equal(self.engine, {v.path: v for v in self.model.trainable_variables})
        self._on_batch_ready[name] = getattr(self.model, "optimizer", None)
        return result

    def _is_first_on_batch(self, name: str) -> bool:
        optimizer = getattr(self.model, "optimizer", None)
        return name not in self._on_batch_ready or self._on_batch_ready[name] is not optimizer

    @property
    def is_running(self) -> bool:
        """Whether one of the verbs runs: who asks is a callback, or the model's own code."""
        return bool(self._verbs)

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[None]:
        self._verbs.append(name)
        try:
            yield
        finally:
            self._verbs.pop()

    # Passes over data.

    def _make_iterator(self, adapter: Any, **steps: Any) -> ShardedEpochIterator:
        return self.data.make_iterator(self._verbs[-1], adapter, **steps)

    def _begin_pass(self) -> None:
        if self._verbs[-1] != "predict":
            self.metrics.begin()
        if self._verbs[-1] != "fit":
            return
        if self.deferred_sums.optimizer is not None:
            self.agree()  # a callback may have loaded weights on one rank: before the sums are apart
            self.deferred_sums.begin()
        if self.averaging is not None:
            self.agree()
            self.averaging.begin()

    def _end_pass(self) -> None:
        if self._verbs[-1] == "predict":
            return
        self.metrics.end()
        if self._verbs[-1] == "fit":
            self.deferred_sums.end()
            self.agree()
            if self.averaging is not None:
                self.averaging.end()

    def _end_a_broken_pass(self) -> None:
        """Puts together what is apart still, because the last `fit` raised in a pass over its data."""
        if self.deferred_sums.is_open and not self._verbs:
            self.deferred_sums.end()
        if self.averaging is not None and self.averaging.is_open and not self._verbs:
            self.agree()
            self.averaging.end()

    def agree(self) -> None:
        """Makes all ranks do at once what one of them asks for: stop training, take over its weights.

        Collective: every rank must call this, in the same order.
        """
        if self.model.stop_training:
            self.requests.ask("stop")
        self.requests.agree()
        self.model.stop_training = "stop" in self.requests.granted
        self.requests.withdraw("stop")
        if "weights" in self.requests.granted:
            self.take_over_weights()

    def take_over_weights(self) -> None:
        """Gives all ranks the state of the first one that asks for it.

        Collective: every rank must call this, in the same order.
        """
        asking = self.engine.gather_objects(self.requests.asks("weights"))
        self.requests.withdraw("weights")
        within_a_pass = self.deferred_sums.is_open
        if within_a_pass:
            self.deferred_sums.end()
        state.broadcast_state(
            self.engine, state.variables_of(self.model), root=asking.index(True) if any(asking) else 0
        )
        if within_a_pass:
            self.deferred_sums.begin()
        if self.averaging is not None and self.averaging.is_open:
            self.averaging.begin()

    def take_kept(self) -> dict[str, Any]:
        """Returns what is kept from step to step beside the model, where all ranks hold the same model.

        Collective: every rank must call this, in the same order.
        """
        if self.averaging is not None and self.averaging.is_open:
            self.agree()  # a rank may want all to take over its weights
            self.averaging.come_together()
        return by_place((self.averaging or self.wire).take(), self.model.variables)

    def give_kept(self, taken: Mapping[str, Any]) -> None:
        """Gives back what `take_kept` has returned; an empty mapping makes it forget."""
        (self.averaging or self.wire).give(by_variable(taken, self.model.variables))

    # State.

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, ShardedEpochIterator):
            data_batch, iterator = iterator.batch_to_build_on(self.model), None
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
        if name.endswith("_on_batch") and self._is_first_on_batch(name):
            self.enter(name)

    def enter(self, verb: str) -> None:
        """Compares the model over the ranks and gives all of them the root's state.

        Collective: every rank must call this, in the same order.

        Args:
            verb: str, what begins, for messages.
        """
        model = self.model
        state.check_agreement(self.engine, f"the model given to {verb}", state.describe_model(model))
        state.broadcast_state(self.engine, state.variables_of(model))
        self.requests.withdraw("weights")
        if verb == "fit":
            model._initial_epoch = self.engine.broadcast_object(model._initial_epoch)

    def rates(self) -> list[EffectiveRate]:
        """Returns the effective rates of the model's optimizers."""
        return self._rates.all()

    # The steps: traced once, or run at every step in eager mode.

    def _make_function(self, step: Callable[..., Any]) -> StepFunction:
        return StepFunction(self.model, self._original("_make_function")(step))

    def train_step(self, data: Any) -> Any:
        """Trains on this rank's share; the weights are the same on all ranks afterwards."""
        if self.strategy.extended.step is not None:
            return self._original("train_step")(data)  # called by another model's step, which has the share already
        is_shard = isinstance(data, Shard)
        kind: Callable[..., TrainStep] = TrainStep
        if self.averaging is not None and is_shard:
            kind = functools.partial(LocalStep, averaging=self.averaging)
        step = kind(
            self.strategy.extended,
            data if is_shard else split_batch(data, self.engine),
            wire=self.wire,
            rate_of=self._rates.of,
            scaled=is_shard,
            requests=self.requests,
            deferring=self.deferred_sums.optimizer if is_shard else None,
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

        # At the end of data of unknown length nothing of one more step may run, not even what needs no data: the count
        # of iterations, weight decay. (In plain Keras they may.)
        def run() -> tuple[Any, Any]:
            return measured_logs(lambda: self._original(name)(step.data), flat_metrics(model), step)

        with step.running(model), tf.control_dependencies(step.arrived):
            logs, results = self._compiled_steps.run(name, step, run)
        self._results[name] = results

        def undo() -> None:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

        tf.cond(step.active, lambda: None, undo)
        if alone:
            add_over_ranks(self.engine, variables, before)
            logs = self._with_results(name, logs)
        return logs

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Returns an epoch's logs: what is a metric's result is read from the metric, now that it is added up.

        Collective: every rank must call this, in the same order.
        """
        name = "train_step" if self._verbs[-1] == "fit" else "test_step"
        logs = self._with_results(name, self._original("_get_metrics_result_or_logs")(logs))
        if self.averaging is None or name != "train_step" or not isinstance(logs, dict):
            return logs
        # A metric's result is that of all ranks; what else a step returns is of a step that nobody else made.
        of_metrics = self._results.get(name, {})
        own = {key: tf.convert_to_tensor(logs[key]) for key in sorted(logs) if key not in of_metrics}
        own = {key: value for key, value in own.items() if value.dtype.is_floating}
        means = self.engine.allreduce([value / tf.cast(self.engine.size, value.dtype) for value in own.values()])
        return {**logs, **dict(zip(own, means, strict=True))}

    def _with_results(self, step_name: str, logs: Any) -> Any:
        results = self._results.get(step_name, {})
        if not isinstance(logs, dict):
            return logs
        return {key: results[key]() if key in results else value for key, value in logs.items()}

    def predict_step(self, data: Any) -> Any:
        """Predicts this rank's share and returns all ranks' predictions, in the order of the rows."""
        if self.strategy.extended.step is not None:
            return self._original("predict_step")(data)
        shard = data if isinstance(data, Shard) else split_batch(data, self.engine)
        step = Step(self.strategy.extended, shard)
        with step.running(self.model):
            outputs = self._original("predict_step")(step.data)
        leaves = keras.tree.flatten(outputs)
        self._dense_outputs = [not isinstance(leaf, tf.RaggedTensor) for leaf in leaves]
        gathered = [gather_rows(self.engine, leaf, step.rows, widths_differ=self.data.widths_differ) for leaf in leaves]
        return keras.tree.pack_sequence_as(outputs, gathered)
