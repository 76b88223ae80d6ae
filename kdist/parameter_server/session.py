"""A Keras model whose steps run on workers, while Keras' own `fit` runs on the chief.

Keras' loops, callbacks and logs are its own. What is replaced on the instance are the functions that make the steps:
they schedule steps and return the logs of those that have finished.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.checkpoint.storage.whole_files import write_whole
from kdist.errors import ScopeError
from kdist.keras_hooks.fit.callbacks import given_callbacks
from kdist.keras_hooks.fit.fit_loop import epoch_iterators
from kdist.keras_hooks.optimizers import innermost, optimizers_of
from kdist.keras_hooks.patching import METHODS, original
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import EPOCH_LOGS, SYMBOLIC_BUILD, has_custom_steps, patch_methods
from kdist.parameter_server.dispatch import Dispatcher
from kdist.parameter_server.epoch import DispatchedEpoch
from kdist.parameter_server.feed import WorkerBatch, WorkerEpochIterator, make_iterator, single_batch
from kdist.parameter_server.functions import WorkerFunctions
from kdist.parameter_server.predictions import PredictionFuture, predictions
from kdist.parameter_server.strategy import ParameterServerStrategy
from kdist.state.random_state import input_seed
from kdist.state.session import TrainingSession, has_session, set_session, step_extension_error
from kdist.state.variables import ModelState
from kdist.strategies.options import ParameterServer

logger = logging.getLogger("kdist")

_KINDS = {"fit": "train", "evaluate": "test"}  # methods whose passes over data write metrics: the kind of their steps


def train_on_workers(
    model: keras.Model, strategy: ParameterServerStrategy, dispatcher: Dispatcher, options: ParameterServer
) -> None:
    """Makes workers run a model's steps. A second call does nothing.

    Args:
        model: `keras.Model`, built or not, compiled or not.
        strategy: `ParameterServerStrategy`.
        dispatcher: `Dispatcher`, which reaches the workers.
        options: `ParameterServer`.
    """
    if not has_session(model):
        session = ParameterServerSession(model, strategy, dispatcher, options)
        patch_methods(model, session.methods())
        set_session(model, session)


class ParameterServerSession(TrainingSession):
    """The session of one model whose steps run on workers.

    Args:
        model: `keras.Model`.
        strategy: `ParameterServerStrategy`.
        dispatcher: `Dispatcher`.
        options: `ParameterServer`.
    """

    def __init__(
        self, model: keras.Model, strategy: ParameterServerStrategy, dispatcher: Dispatcher, options: ParameterServer
    ) -> None:
        super().__init__(model)
        self.strategy = strategy
        self.dispatcher = dispatcher
        self.functions = WorkerFunctions(model, strategy, options)
        self._warmup_steps = options.warmup_steps
        self._num_trained = 0  # steps of this `fit`, in the epochs before
        self._running: list[str] = []
        self._epochs: dict[str, DispatchedEpoch] = {}
        self._num_sources = 0
        self._logged_bytes: list[int] = []

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Returns by name the functions that take the places of the model's own methods."""
        methods: dict[str, Callable[..., Any]] = {name: functools.partial(self._run, name) for name in METHODS}
        # A ps that is lost while its variables are saved must not destroy the last checkpoint.
        writers = ("save", "save_weights", "export")
        methods |= {name: functools.partial(write_whole, None, original(self.model, name)) for name in writers}
        return methods | {
            "make_train_function": functools.partial(self._make_function, "train", self._make_steps),
            "make_test_function": functools.partial(self._make_function, "test", self._make_steps),
            "make_predict_function": functools.partial(self._make_function, "predict", self._predict),
            SYMBOLIC_BUILD: self._build_symbolically,
            EPOCH_LOGS: lambda logs: self._epochs[self._running[-1]].epoch_logs(),
        }

    def check_step_extension(self, who: str, *, joint: bool = False) -> None:
        """Raises: workers run no callbacks; see `TrainingSession.check_step_extension`."""
        raise step_extension_error(who, self.model)

    def check_save_frequency(self, save_freq: str | int) -> None:
        """Raises unless a backup is saved between epochs; see `TrainingSession.check_save_frequency`."""
        if save_freq != "epoch":
            raise ScopeError(
                "With parameter servers a backup is saved between epochs only. Received: "
                f"save_freq={save_freq!r}. Expected 'epoch': within an epoch some steps are always in flight. "
                "Fix: leave save_freq out."
            )

    def synchronize(self) -> None:
        """Waits for the steps of a running `fit` that are in flight, and counts them in its metrics."""
        if self._running and self._running[-1] in self._epochs:
            self._epochs[self._running[-1]].finish_early()

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.model, "run_eagerly", False):
            raise ScopeError(
                "Steps cannot run eagerly on workers. Received: run_eagerly=True. Expected steps that are graphs: "
                "workers run no Python. Fix: leave run_eagerly out of compile, or debug in one process."
            )
        if self.model.jit_compile:
            self.model.jit_compile = False
            logger.warning("jit_compile=True is off for this model: XLA cannot compile variables of another process.")
        if name == "fit":
            self._num_trained = 0
            bound = inspect.signature(original(self.model, name)).bind(*args, **kwargs)
            for callback in given_callbacks(named_arguments(bound)):
                if isinstance(callback, keras.callbacks.BackupAndRestore):
                    self.check_save_frequency(callback.save_freq)
            if self.dispatcher.num_workers > 1:
                self._check_optimizers()
        self._running.append(name)
        with self.dispatcher.failure_detection(), epoch_iterators(self._make_iterator, self.strategy):
            try:
                return original(self.model, name)(*args, **kwargs)
            except tf.errors.UnavailableError as error:  # raised where a variable is read, by a callback say
                raise self.dispatcher.explained(error) from error
            finally:
                self._running.pop()

    def _check_optimizers(self) -> None:
        """Raises for what Keras does in every n-th step: workers that count at once omit it, or do it twice."""
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

    def _make_iterator(self, adapter: Any, *, is_for_training: bool, **steps: Any) -> WorkerEpochIterator:
        self._num_sources += 1
        in_flight = functools.partial(predictions, self.dispatcher, self.functions)
        return make_iterator(
            adapter,
            seed=input_seed(repr(random.getstate()), self._num_sources),
            begin_pass=self._begin_pass,
            end_pass=self._end_pass,
            iterate=in_flight if self._running[-1] == "predict" else iter,
            **steps,
        )

    def _build_symbolically(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, WorkerEpochIterator):
            data_batch = iterator.batch_to_build_on(self.model)
        try:
            original(self.model, SYMBOLIC_BUILD)(data_batch=data_batch)
        except Exception:
            # A model with steps of its own may not be callable. The layout of the steps needs all metrics.
            if not has_custom_steps(self.model) or not all(getattr(each, "built", True) for each in self.model.metrics):
                raise
        self._check_devices()
        bytes_of_ps = list(self.strategy.extended.bytes_of_ps)
        if bytes_of_ps != self._logged_bytes:
            self._logged_bytes = bytes_of_ps
            logger.info("bytes of variables on each ps: %s", ", ".join(f"{n:,}" for n in bytes_of_ps))

    def _check_devices(self) -> None:
        """Raises for variables that the workers cannot read."""
        metrics = {id(variable) for variable in self.model.metrics_variables}
        with self.strategy.scope():  # which may be closed, and Keras' seed generator may not be made yet
            variables = ModelState(self.model).variables()
        for variable in variables:
            if id(variable) not in metrics and "/job:ps" not in str(variable.value.device):
                raise ScopeError(
                    "A variable is not on a ps. Received: "
                    f"{variable.path!r}, made outside of kdist.scope(). Expected layers, optimizers and seed "
                    "generators to be made in the scope. Fix: move the line that makes it into the scope."
                )

    def _epoch(self, kind: str) -> DispatchedEpoch:
        warmup_steps = self._warmup_steps - self._num_trained if kind == "train" else 0
        return DispatchedEpoch(self.dispatcher, self.functions, kind, warmup_steps)

    def _begin_pass(self) -> None:
        if kind := _KINDS.get(self._running[-1]):
            epoch = self._epochs[self._running[-1]] = self._epoch(kind)
            self.metrics.begin(is_of_fit=kind == "train")
            epoch.resume()

    def _end_pass(self) -> None:
        if self._running[-1] in self._epochs:
            self._epochs[self._running[-1]].finish()
        if self._running[-1] == "fit":
            self._num_trained += self._epochs["fit"].num_scheduled

    def _make_function(self, kind: str, run: Callable[[str, Any], Any], force: bool = False) -> None:
        if force or getattr(self.model, f"{kind}_function") is None:
            self.functions.forget(kind)
            setattr(self.model, f"{kind}_function", functools.partial(run, kind))

    def _make_steps(self, kind: str, iterator: Iterator[Any]) -> dict[str, Any]:
        """Schedules one execution of some steps; returns the logs of the steps that have finished."""
        batches = list(itertools.islice(iterator, self.model.steps_per_execution))
        if not batches:
            raise StopIteration
        if isinstance(batches[0], WorkerBatch):
            epoch = self._epochs[self._running[-1]]
            epoch.schedule(batches)
            return epoch.logs()
        epoch = self._epoch(kind)  # a batch of `train_on_batch` or `test_on_batch`
        epoch.schedule(list(map(single_batch, batches)))
        epoch.finish()
        return epoch.logs(now=True)

    def _predict(self, kind: str, data: list[Any]) -> Any:
        """Returns the predictions of some batches, or of futures of theirs, as one batch."""
        is_future = isinstance(data[0], PredictionFuture)
        start = functools.partial(PredictionFuture, self.dispatcher, self.functions)
        outputs = [each.result() for each in (data if is_future else map(start, map(single_batch, data)))]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
