"""A Keras model whose steps are made by workers, while Keras' own `fit` runs on the chief.

Keras' loops, callbacks and logs are its own. What is replaced on the instance are the functions that make the steps:
they hand steps out and take in what has finished.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.errors import ScopeError
from kdist.strategies.dispatch import Dispatcher
from kdist.strategies.options import ParameterServer
from kdist.strategies.parameter_server import ParameterServerStrategy
from kdist.training import _keras_internals as internals
from kdist.training.arguments import like
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.saving import write_whole
from kdist.training.scheduled_data import Batches, Feed, OneBatch, ScheduledEpochIterator, make_feed
from kdist.training.scheduled_pass import Pass
from kdist.training.scheduled_predictions import Predictions, Ticket
from kdist.training.scheduled_step import ScheduledStep
from kdist.training.state import variables_of

logger = logging.getLogger("kdist")


def schedule(
    model: keras.Model, strategy: ParameterServerStrategy, dispatcher: Dispatcher, options: ParameterServer
) -> None:
    """Makes a model's steps be made by the workers. Doing it twice does nothing.

    Args:
        model: `keras.Model`, built or not, compiled or not.
        strategy: `ParameterServerStrategy`.
        dispatcher: `Dispatcher`, which reaches the workers.
        options: `ParameterServer`.
    """
    if "_kdist" not in model.__dict__:
        ScheduledModel(model, strategy, dispatcher, options).install()


class ScheduledModel:
    """What kdist keeps beside one model.

    Args:
        model: `keras.Model`.
        strategy: `ParameterServerStrategy`.
        dispatcher: `Dispatcher`.
        options: `ParameterServer`.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ParameterServerStrategy,
        dispatcher: Dispatcher,
        options: ParameterServer,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.dispatcher = dispatcher
        self.options = options
        self._verbs: list[str] = []
        self._functions: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self._passes: dict[str, Pass] = {}
        self._num_sources = 0
        self._bytes_said: list[int] = []

    def install(self) -> None:
        """Puts the wrappers on the instance, in front of what its class says."""
        wrappers: dict[str, Callable[..., Any]] = {
            name: functools.partial(self._verb, name) for name in internals.VERBS
        }
        wrappers |= {
            "make_train_function": functools.partial(self._make_function, "train"),
            "make_test_function": functools.partial(self._make_function, "test"),
            "make_predict_function": self._make_predict_function,
            "_maybe_symbolic_build": self._maybe_symbolic_build,
            "_get_metrics_result_or_logs": self._get_metrics_result_or_logs,
        }
        # A ps that is lost while its variables are saved must not take the last checkpoint with it.
        writers = ("save", "save_weights", "export")
        wrappers |= {name: functools.partial(write_whole, self._original(name)) for name in writers}
        for name, wrapper in wrappers.items():
            self.model.__dict__[name] = like(getattr(type(self.model), name), wrapper)
        self.model.__dict__["_kdist"] = self

    def _original(self, name: str) -> Callable[..., Any]:
        return getattr(type(self.model), name).__get__(self.model)

    def _verb(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.model, "run_eagerly", False):
            raise ScopeError(
                "Steps cannot run eagerly on workers. Received: run_eagerly=True. Expected steps that are graphs: "
                "workers run no Python. Fix: leave run_eagerly out of compile, or debug in one process."
            )
        if self.model.jit_compile:
            self.model.jit_compile = False
            logger.warning("jit_compile=True is off for this model: XLA cannot compile variables of another process.")
        if name == "fit" and self.dispatcher.num_workers > 1:
            self._refuse_counted_updates()
        self._verbs.append(name)
        with self.dispatcher.watched(), internals.epoch_iterators(self._make_iterator, self.strategy):
            try:
                return self._original(name)(*args, **kwargs)
            except tf.errors.UnavailableError as error:  # met by what reads a variable, a callback say
                raise self.dispatcher.explained(error) from error
            finally:
                self._verbs.pop()

    def _refuse_counted_updates(self) -> None:
        """Refuses what Keras does in every n-th step: workers count at once, and miss it, or do it twice."""
        optimizers = [innermost(optimizer) for optimizer in optimizers_of(self.model)]
        optimizers += [part for optimizer in optimizers for part in getattr(optimizer, "optimizers", ())]
        for optimizer in optimizers:
            for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
                if getattr(optimizer, name, None):
                    raise ScopeError(
                        f"Several workers cannot count steps together. Received: {type(optimizer).__name__} with "
                        f"{name}={getattr(optimizer, name)}, and {self.dispatcher.num_workers} workers. Expected None. "
                        "Fix: a larger batch, or one worker, or synchronous training (kdist.AllReduce)."
                    )

    # Data.

    def _make_iterator(
        self, adapter: Any, *, steps_per_epoch: int | None, steps_per_execution: int
    ) -> ScheduledEpochIterator:
        feed = make_feed(adapter, seed=self._next_seed(), steps_per_epoch=steps_per_epoch, one_process=SingleEngine())
        return ScheduledEpochIterator(
            feed,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
            begin_pass=self._begin_pass,
            end_pass=self._end_pass,
            wrap=(lambda batches: Predictions(self, batches))
            if self._verbs[-1] == "predict"
            else lambda batches: batches,
        )

    def _next_seed(self) -> int:
        self._num_sources += 1
        text = f"{random.getstate()} {self._num_sources}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, ScheduledEpochIterator):
            data_batch = iterator.feed.batch_to_build_on(self.model)
        self._original("_maybe_symbolic_build")(data_batch=data_batch)
        self._check_homes()

    def _check_homes(self) -> None:
        """Refuses variables that the workers cannot reach, and says once how many bytes each ps holds."""
        metrics = {id(variable) for variable in self.model.metrics_variables}
        for variable in variables_of(self.model):
            if id(variable) not in metrics and "/job:ps" not in str(variable.value.device):
                raise ScopeError(
                    "A variable is not on a ps. Received: "
                    f"{variable.path!r}, made outside of kdist.scope(). Expected layers, optimizers and seed "
                    "generators to be made in the scope. Fix: move the line that makes it into the scope."
                )
        held = self.strategy.extended.bytes_of_ps
        if held != self._bytes_said:
            self._bytes_said = list(held)
            logger.info("bytes of variables on each ps: %s", ", ".join(f"{n:,}" for n in held))

    # Passes over data, whose steps write metrics.

    def _begin_pass(self) -> None:
        if self._verbs[-1] in ("fit", "evaluate"):
            self._passes[self._verbs[-1]] = Pass(self, "train" if self._verbs[-1] == "fit" else "test")

    def _end_pass(self) -> None:
        if self._verbs[-1] in self._passes:
            self._passes[self._verbs[-1]].finish()

    def _make_function(self, kind: str, force: bool = False) -> None:
        if force or getattr(self.model, f"{kind}_function") is None:
            self._functions = {key: value for key, value in self._functions.items() if key[0] != kind}
            setattr(self.model, f"{kind}_function", functools.partial(self._execute, kind))

    def _execute(self, kind: str, iterator: Any) -> Any:
        """Schedules one execution of some steps; returns logs as they are known now."""
        if isinstance(iterator, Batches):
            current = self._passes["fit" if kind == "train" else "evaluate"]
            current.schedule(iterator.feed, iterator.take(self.model.steps_per_execution))
            return current.logs()
        alone = Pass(self, kind)
        for data in iterator:
            feed = Feed(OneBatch(data))
            alone.schedule(feed, Batches(feed, feed.source.dataset()).take(1))
        alone.finish()
        return alone.logs(now=True)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return self._passes[self._verbs[-1]].epoch_logs()

    def traced(
        self, kind: str, feed: Feed, num_batches: int, starts: list[np.ndarray]
    ) -> tuple[Callable[..., Any], Any]:
        """Returns the function that makes some steps of a kind on a worker, and what it returns."""
        packing = feed.packing
        key = (kind, num_batches, feed.kind)
        if key not in self._functions:
            step = ScheduledStep(self.model, f"{kind}_step", self.strategy, self.options, starts)
            num_kept, width = len(feed.resident_specs), len(packing.specs)

            def execution(*flat: tf.Tensor) -> list[tf.Tensor]:
                kept, sent = list(flat[:num_kept]), flat[num_kept:]
                batches = [packing.packed(sent[i * width : (i + 1) * width]) for i in range(num_batches)]
                return [step.vector([feed.restored(kept, batch) for batch in batches])]

            specs = [*feed.resident_specs, *(packing.specs * num_batches)]
            with self.strategy.scope():
                self._functions[key] = (_concrete(execution, specs), step.layout)
        return self._functions[key]

    # Predictions, in the order of the rows.

    def _make_predict_function(self, force: bool = False) -> None:
        if not force and self.model.predict_function is not None:
            return
        self._functions = {key: value for key, value in self._functions.items() if key[0] != "predict"}

        def function(data: list[Any]) -> Any:
            given = data if isinstance(data[0], Ticket) else [self._predict_alone(batch) for batch in data]
            outputs = [ticket.wait() for ticket in given]
            return (
                keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
                if len(outputs) > 1
                else outputs[0]
            )

        self.model.predict_function = function

    def _predict_alone(self, batch: Any) -> Ticket:
        feed = Feed(OneBatch(batch))
        return self.predict(feed, Batches(feed, feed.source.dataset()).take(1)[0])

    def predict(self, feed: Feed, sent: list[tf.Tensor]) -> Ticket:
        """Schedules the prediction of one batch."""
        packing = feed.packing
        key = ("predict", feed.kind)
        if key not in self._functions:
            num_kept, outputs = len(feed.resident_specs), []

            def prediction(*flat: tf.Tensor) -> list[tf.Tensor]:
                data = feed.restored(list(flat[:num_kept]), packing.packed(flat[num_kept:]))
                result = self.strategy.run(self.model.predict_step, args=(data,))
                outputs.append(result)
                return tf.nest.flatten(result, expand_composites=True)

            with self.strategy.scope():
                self._functions[key] = (_concrete(prediction, [*feed.resident_specs, *packing.specs]), outputs[-1])
        function, structure = self._functions[key]
        ticket = Ticket(self.dispatcher, structure)
        self.dispatcher.submit(function, sent, feed.resident, ticket.take)
        return ticket


def _concrete(function: Callable[..., Any], specs: list[tf.TensorSpec]) -> Callable[..., Any]:
    return tf.function(function, autograph=False).get_concrete_function(*specs)
