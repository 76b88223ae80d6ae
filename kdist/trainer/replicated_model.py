"""A Keras model whose methods work on this rank's share of the data.

A few methods on the instance are replaced; they call the model's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from kdist.keras_hooks.fit.fit_loop import epoch_iterators
from kdist.keras_hooks.optimizers import innermost, optimizers_of
from kdist.keras_hooks.patching import METHODS, original
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import SYMBOLIC_BUILD, is_built, patch_methods, set_strategy
from kdist.reports.log import warnings_at_users_lines
from kdist.restarts.events import own_reports
from kdist.state.comparison import check_agreement
from kdist.state.session import has_session, set_session
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.strategies.collectives import running_method
from kdist.strategies.settings import Settings
from kdist.trainer import saving
from kdist.trainer.building import build, prepare_optimizers
from kdist.trainer.callback_list import replicated_callbacks
from kdist.trainer.feeding.epoch_iterator import ShardedEpochIterator
from kdist.trainer.metric_reset import MetricReset
from kdist.trainer.other_libraries import refuse_parts_of_horovod
from kdist.trainer.predictions import as_dense
from kdist.trainer.replicated_session import ReplicatedSession
from kdist.trainer.replicated_steps import ReplicatedSteps

_ON_BATCH = tuple(name for name in METHODS if name.endswith("_on_batch"))


def replicate(model: keras.Model, strategy: AllReduceStrategy, settings: Settings) -> None:
    """Makes a model's methods work on this rank's share of the data; a second call has no effect."""
    if has_session(model):
        return
    set_strategy(model, strategy)
    # Functions of an earlier use call the class's own steps.
    model.train_function = model.test_function = model.predict_function = None
    ReplicatedModel(ReplicatedSession(model, strategy, settings)).install()


class ReplicatedModel:
    """The methods that wrap those of one model."""

    def __init__(self, session: ReplicatedSession) -> None:
        self.session = session
        self._model = session.model
        self._engine = session.engine
        self._steps = ReplicatedSteps(session)
        self._metric_reset = MetricReset(session.model, original(session.model, "reset_metrics"))
        self._broadcast_for: list[keras.optimizers.Optimizer] = []
        self._prepared_optimizers: dict[str, Any] = {}  # by method on a batch: the optimizer at its last call

    def install(self) -> None:
        """Sets the methods on the instance, and the model's session."""
        methods = {
            name: functools.partial(self._call, self._run_on_batch if name in _ON_BATCH else self._run, name)
            for name in METHODS
        }
        hooks = {SYMBOLIC_BUILD: self._maybe_symbolic_build, "reset_metrics": self._reset_metrics}
        patch_methods(self._model, {**methods, **hooks, **saving.wrappers(self.session)})
        self._steps.install()
        set_session(self._model, self.session)

    def _call(self, method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        with (
            self._engine.activity.running(f"model.{name}"),
            warnings_at_users_lines(),
            running_method(self.session.strategy),
        ):
            return method(name, *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        session, run = self.session, original(self._model, name)
        if isinstance(kwargs.get("callbacks"), keras.callbacks.CallbackList) and session.running_methods:
            with session.running(name):  # validation within fit
                return run(*args, **kwargs)
        is_outermost = not session.running_methods
        session.warn_of_other_settings()
        session.end_interrupted_pass()
        arguments = named_arguments(inspect.signature(run).bind(*args, **kwargs))
        if is_outermost:
            refuse_parts_of_horovod(optimizers_of(self._model), arguments.get("callbacks"))
        session.feed.begin_call(name, arguments, is_outermost=is_outermost)
        if not is_outermost:
            session.agree()  # a callback may have loaded weights on this rank
        self._steps.begin_call()
        if name == "fit":
            session.slots.load_state_dict({})  # the weights may be others
        with (
            session.running(name),
            session.feed.running_fit(arguments) if name == "fit" else contextlib.nullcontext(),
            session.effective_rates.keeping_data() if name == "fit" and not is_outermost else contextlib.nullcontext(),
            session.feed.outermost_call() if is_outermost else contextlib.nullcontext(),
            replicated_callbacks(session, name, is_outermost),
            epoch_iterators(self._make_iterator, session.strategy, is_chief=self._engine.rank == 0),
        ):
            result = run(*args, **kwargs)
            return as_dense(result, self._steps.dense_outputs) if name == "predict" else result

    def _run_on_batch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        session.end_interrupted_pass()
        self._steps.begin_call()
        is_first = self._is_first(name)
        if is_first:
            refuse_parts_of_horovod(optimizers_of(self._model), None)
            session.feed.agree_random_state(name)
            if name == "predict_on_batch":  # Keras does not build the model here
                built = self._model.built
                check_agreement(self._engine, f"the model given to {name}", {"whether it is built": built})
                if built:
                    session.broadcast_state(name)
        else:
            session.agree()  # a rank may have loaded weights since
            if not session.running_methods:
                session.votes.withdraw("stop")  # the flag says it, which the script may set back
        if name == "train_on_batch":
            session.effective_rates.notice_fewer_steps()
        # In a callback of `fit` the metrics are in the midst of a pass.
        is_nested = bool(session.running_methods)
        with session.metrics.counting_together() if is_nested else contextlib.nullcontext(), session.running(name):
            result = original(self._model, name)(*args, **kwargs)
        if name == "predict_on_batch":
            result = as_dense(result, self._steps.dense_outputs)
        if is_first and name == "train_on_batch":
            own_reports.made_step()
            session.common_state.check_first_step()
        self._prepared_optimizers[name] = getattr(self._model, "optimizer", None)
        return result

    def _is_first(self, name: str) -> bool:
        """Returns whether a method prepares the model: on a batch in the first call with an optimizer, else in each."""
        optimizer = getattr(self._model, "optimizer", None)
        return name not in self._prepared_optimizers or self._prepared_optimizers[name] is not optimizer

    def _make_iterator(self, adapter: Any, **steps: Any) -> ShardedEpochIterator:
        session = self.session
        iterator = session.feed.make_iterator(session.running_methods[-1], adapter, **steps)
        if iterator.data_adapter.is_for_training:
            session.effective_rates.set_data(iterator.data_adapter.source.batches_in_steps)
        return iterator

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, ShardedEpochIterator):
            data_batch, iterator = iterator.batch_to_build_on(self._model), None
        prepare_optimizers(self.session)
        name = self.session.running_methods[-1] if self.session.running_methods else ""
        is_first = self._is_first(name)
        if len(self.session.running_methods) == 1 and is_first and self.session.parts_reducer is not None:
            # A rule may copy the weights, of which some ranks may have others, to its sharded slots.
            waiting = [each for each in map(innermost, optimizers_of(self._model)) if not each.built]
            waits = any(each not in self._broadcast_for for each in waiting) and is_built(self._model)[0]
            if all(self._engine.gather_objects(waits)):
                self._broadcast_for = waiting  # some may never be used
                self.session.broadcast_state(name)
        build(self.session, iterator, data_batch)
        if is_first and name in _ON_BATCH:
            self.session.broadcast_state(name)

    def _reset_metrics(self) -> None:
        self._metric_reset()
        if any(method not in _ON_BATCH for method in self.session.running_methods):  # in a pass over data
            self.session.metrics.rebase()
