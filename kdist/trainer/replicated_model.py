"""A Keras model whose methods and steps work on this rank's share of the data.

A few methods on the instance are replaced; they call the model's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.data.batch import Rows, Shard
from kdist.keras_hooks.custom_steps import CustomSteps
from kdist.keras_hooks.fit.fit_loop import epoch_iterators
from kdist.keras_hooks.metrics import summed_variables
from kdist.keras_hooks.optimizers import innermost, optimizers_of
from kdist.keras_hooks.patching import METHODS, original
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import (
    EPOCH_LOGS,
    MAKE_FUNCTION,
    SYMBOLIC_BUILD,
    computes_custom_loss,
    is_built,
    is_overridden,
    keeps_states,
    keeps_states_of_one_row,
    patch_methods,
    set_strategy,
)
from kdist.reports.log import warnings_at_users_lines
from kdist.sharding.refusals import lookups_in_loops_refused
from kdist.state.comparison import check_agreement
from kdist.state.metrics import add_over_ranks
from kdist.state.session import has_session, set_session
from kdist.step.compiled import CompiledSteps
from kdist.step.extensions import added_stages, has_extensions
from kdist.step.local_sgd_step import LocalSGDStep
from kdist.step.step import Step
from kdist.step.step_function import StepFunction
from kdist.step.step_logs import measured_logs
from kdist.step.traced_rows import TracedRows
from kdist.step.train_step import ForwardStep, TrainStep
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.strategies.settings import Settings
from kdist.trainer import saving
from kdist.trainer.building import build, prepare_optimizers
from kdist.trainer.callback_list import replicated_callbacks
from kdist.trainer.feeding.epoch_iterator import ShardedEpochIterator
from kdist.trainer.feeding.given_rows import given_rows, with_one_row, with_unknown_numbers
from kdist.trainer.metric_reset import MetricReset
from kdist.trainer.other_libraries import refuse_parts_of_horovod
from kdist.trainer.predictions import as_dense, gather_rows
from kdist.trainer.session import ReplicatedSession


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
        self._extended = session.strategy.extended
        self._compiled_steps = CompiledSteps(session.model)
        self._metric_reset = MetricReset(session.model, self._original("reset_metrics"))
        self._dense_outputs: list[bool] = []
        self._broadcast_for: list[keras.optimizers.Optimizer] = []
        self._results: dict[str, dict[str, Callable[[], Any]]] = {}
        self._traced_rows = {
            "train_step": TracedRows(),
            "test_step": TracedRows(),
            "predict_step": TracedRows(are_unknown=True),
        }
        self._prepared_optimizers: dict[str, Any] = {}  # by method on a batch: the optimizer at its last call
        self._custom_steps = CustomSteps(
            session.model,
            {"train_step": self.train_step, "test_step": self.test_step, "predict_step": self.predict_step},
        )

    def install(self) -> None:
        """Sets the methods on the instance, and the model's session."""
        methods = {
            name: functools.partial(self._call, self._run_on_batch if name.endswith("_on_batch") else self._run, name)
            for name in METHODS
        }
        hooks: dict[str, Callable[..., Any]] = {
            MAKE_FUNCTION: self._make_function,
            "make_predict_function": self._make_predict_function,
            SYMBOLIC_BUILD: self._maybe_symbolic_build,
            EPOCH_LOGS: self._epoch_logs,
            "reset_metrics": self._reset_metrics,
        }
        patch_methods(self._model, {**methods, **hooks, **saving.wrappers(self.session)})
        self._custom_steps.patch()
        set_session(self._model, self.session)

    def _original(self, name: str) -> Callable[..., Any]:
        return original(self._model, name)

    # The methods.

    def _call(self, method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        with self._engine.activity.running(f"model.{name}"), warnings_at_users_lines():
            return method(name, *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        session, run = self.session, self._original(name)
        if isinstance(kwargs.get("callbacks"), keras.callbacks.CallbackList) and session.running_methods:
            with session.running(name):  # validation within fit
                return run(*args, **kwargs)
        is_outermost = not session.running_methods
        if is_outermost and not has_extensions(self._model):
            self._custom_steps.patch()
        session.warn_of_other_settings()
        session.end_interrupted_pass()
        arguments = named_arguments(inspect.signature(run).bind(*args, **kwargs))
        if is_outermost:
            refuse_parts_of_horovod(optimizers_of(self._model), arguments.get("callbacks"))
        session.feed.begin_call(name, arguments)
        if not is_outermost:
            session.agree()  # a callback may have loaded weights on this rank
        self._compiled_steps.disable_keras_compilation()
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
            return as_dense(result, self._dense_outputs) if name == "predict" else result

    def _run_on_batch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        session.end_interrupted_pass()
        if not session.running_methods and not has_extensions(self._model):
            self._custom_steps.patch()
        self._compiled_steps.disable_keras_compilation()
        # The first call with an optimizer does what the other methods do at each call.
        is_first = self._is_first_on_batch(name)
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
            result = self._original(name)(*args, **kwargs)
        if name == "predict_on_batch":
            result = as_dense(result, self._dense_outputs)
        if is_first and name == "train_on_batch":
            session.common_state.check_first_step()
        self._prepared_optimizers[name] = getattr(self._model, "optimizer", None)
        return result

    def _is_first_on_batch(self, name: str) -> bool:
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
        is_first = name not in self._on_batch_methods or self._is_first_on_batch(name)
        if len(self.session.running_methods) == 1 and is_first and self.session.parts_reducer is not None:
            # A rule may copy the weights, of which some ranks may have others, to its sharded slots.
            waiting = [each for each in map(innermost, optimizers_of(self._model)) if not each.built]
            waits = any(each not in self._broadcast_for for each in waiting) and is_built(self._model)[0]
            if all(self._engine.gather_objects(waits)):
                self._broadcast_for = waiting  # some may never be used
                self.session.broadcast_state(name)
        build(self.session, iterator, data_batch)
        if name in self._on_batch_methods and self._is_first_on_batch(name):
            self.session.broadcast_state(name)

    _on_batch_methods = tuple(name for name in METHODS if name.endswith("_on_batch"))

    # The steps: traced once, or run eagerly.

    def _make_function(self, step: Callable[..., Any]) -> StepFunction:
        rows = self._traced_rows["test_step" if step == self._model.test_step else "train_step"]
        if computes_custom_loss(self._model):
            rows.hide_row_count()
        return StepFunction(self._model, functools.partial(self._original(MAKE_FUNCTION), step), rows)

    def _make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        before = self._model.predict_function
        result = self._original("make_predict_function")(*args, **kwargs)
        made = self._model.predict_function
        # A user's own function may run Python that no graph can hold.
        if made is not before and not is_overridden(self._model, "make_predict_function"):
            self._model.predict_function = StepFunction(self._model, lambda: made, self._traced_rows["predict_step"])
        return result

    def _share(self, data: Any, name: str) -> Shard:
        """Returns this rank's rows of what a step was given: its share already, or a batch of the user's."""
        shard = self._shard_of(data)
        if self._traced_rows[name].are_unknown and not keeps_states(self._model):
            shard = shard._replace(data=with_unknown_numbers(shard.data))
        return shard._replace(data=with_one_row(shard.data)) if keeps_states_of_one_row(self._model) else shard

    def _shard_of(self, data: Any) -> Shard:
        if isinstance(data, Shard):
            return data
        rows = Rows(data)
        # `strategy.run` gives each replica its own rows.
        if not self.session.running_methods and self._extended.is_in_replica:
            return given_rows(data, rows)
        return rows.split(data, self._engine.size, self._engine.rank)

    def train_step(self, data: Any) -> Any:
        """Trains on this rank's share of a batch."""
        if self._extended.step is not None:
            return self._custom_steps.get("train_step")(data)  # called in another model's step, on its share
        session, is_shard = self.session, isinstance(data, Shard)
        kind: Callable[..., TrainStep] = TrainStep
        if session.local_sgd is not None and is_shard:
            kind = functools.partial(LocalSGDStep, local_sgd=session.local_sgd)
        step = kind(
            self._extended,
            self._share(data, "train_step"),
            traced_rows=self._traced_rows["train_step"],
            written=session.written,
            is_traced_alike=is_shard,
            reducer=session.reducer,
            rate_of=session.rate_of,
            scaled=is_shard,
            votes=session.votes,
            reduction=session.reduction(is_fit=is_shard),
            extensions=added_stages(self._model),
            updates=session.new_updates(),
        )
        # Keras calls it in a replica's context; a callback or a loop of the user's may not.
        replica = contextlib.nullcontext() if self._extended.is_in_replica else self._extended.step_replica()
        loops = lookups_in_loops_refused(self._model)
        with self._traced_rows["train_step"].tracing(), self._counting_by_itself(is_shard=is_shard), replica, loops:
            return self._measured_step("train_step", step, is_whole_pass=not is_shard)

    def test_step(self, data: Any) -> Any:
        """Evaluates this rank's share of a batch."""
        if self._extended.step is not None:
            return self._custom_steps.get("test_step")(data)
        is_shard = isinstance(data, Shard)
        step = ForwardStep(
            self._extended,
            self._share(data, "test_step"),
            traced_rows=self._traced_rows["test_step"],
            written=self.session.written,
            is_traced_alike=is_shard,
        )
        with self._traced_rows["test_step"].tracing(), self._counting_by_itself(is_shard=is_shard):
            return self._measured_step("test_step", step, is_whole_pass=not is_shard)

    def _counting_by_itself(self, *, is_shard: bool) -> contextlib.AbstractContextManager[None]:
        """A context for a step that a callback calls by itself: the metrics are in the midst of a call's pass."""
        is_within_a_pass = bool(self.session.running_methods) and not self._extended.is_in_replica
        is_called_alone = is_within_a_pass and not is_shard and tf.executing_eagerly()
        return self.session.metrics.counting_together() if is_called_alone else contextlib.nullcontext()

    def _measured_step(self, name: str, step: Step, *, is_whole_pass: bool) -> Any:
        """Runs a step that writes metrics, and sums them over the ranks if this is the whole pass."""
        model = self._model

        def counted() -> list[Any]:
            return summed_variables(model) if step.has_joint_metrics else model.metrics_variables

        variables = counted()
        before = [tf.identity(v.value) for v in variables]

        def run() -> tuple[Any, Any]:
            return measured_logs(lambda: self._custom_steps.get(name)(step.data), model, step)

        done = self._compiled_steps.run(name, step, run) if self._compiled_steps.is_requested else None
        if done is None:
            with step.opened(model):
                done = run()
        logs, self._results[name] = done
        # In a loop of the user's the first step makes the compiled metrics.
        made = [v for v in counted() if all(v is not known for known in variables)]
        variables, before = [*variables, *made], [*before, *(tf.zeros_like(v.value) for v in made)]

        def undo() -> None:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

        tf.cond(step.active, lambda: None, undo)
        if is_whole_pass:
            add_over_ranks(self._engine, variables, before)
            logs = self._with_results(name, logs)
        return logs

    def _reset_metrics(self) -> None:
        self._metric_reset()
        if any(method not in self._on_batch_methods for method in self.session.running_methods):  # in a pass over data
            self.session.metrics.rebase()

    def _epoch_logs(self, logs: Any) -> Any:
        """Returns an epoch's logs, with the results of the summed metrics.

        Collective: every rank must call this, in the same order.
        """
        name = "train_step" if self.session.running_methods[-1] == "fit" else "test_step"
        if isinstance(logs, dict) and not logs and name == "train_step":  # no step was left in a resumed epoch
            logs = self._results.get(name, self._model.get_metrics_result())
        logs = self._with_results(name, self._original(EPOCH_LOGS)(logs))
        if self.session.local_sgd is None or name != "train_step" or not isinstance(logs, dict):
            return logs
        # In local SGD other values are of this rank's last step only.
        results = self._results.get(name, {})
        local = {key: tf.convert_to_tensor(logs[key]) for key in sorted(logs) if key not in results}
        local = {key: value for key, value in local.items() if value.dtype.is_floating}
        means = self._engine.allreduce([value / tf.cast(self._engine.size, value.dtype) for value in local.values()])
        return {**logs, **dict(zip(local, means, strict=True))}

    def _with_results(self, step_name: str, logs: Any) -> Any:
        results = self._results.get(step_name, {})
        if not isinstance(logs, dict):
            return logs
        return {key: results[key]() if key in results else value for key, value in logs.items()}

    def predict_step(self, data: Any) -> Any:
        """Predicts this rank's share, and returns all ranks' predictions in the order of the rows."""
        if self._extended.step is not None:
            return self._custom_steps.get("predict_step")(data)
        step = ForwardStep(
            self._extended, self._share(data, "predict_step"), written=self.session.written, is_traced_alike=False
        )
        with step.running(self._model):
            outputs = self._custom_steps.get("predict_step")(step.data)
        leaves = keras.tree.flatten(outputs)
        self._dense_outputs = [not isinstance(leaf, tf.RaggedTensor) for leaf in leaves]
        widths_differ = self.session.feed.widths_differ
        gathered = [gather_rows(self._engine, step, leaf, widths_differ=widths_differ) for leaf in leaves]
        return keras.tree.pack_sequence_as(outputs, gathered)
