"""The steps of a model: traced once, or run eagerly, on this rank's share of a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.data.batch import Rows, Shard
from kdist.keras_hooks.custom_steps import CustomSteps
from kdist.keras_hooks.metrics import summed_variables
from kdist.keras_hooks.patching import original
from kdist.keras_hooks.trainer import (
    EPOCH_LOGS,
    MAKE_FUNCTION,
    computes_custom_loss,
    is_overridden,
    keeps_states,
    keeps_states_of_one_row,
    patch_methods,
)
from kdist.sharding.refusals import lookups_in_loops_refused
from kdist.state.metrics import add_over_ranks
from kdist.step.compiled import CompiledSteps
from kdist.step.extensions import added_stages, has_extensions
from kdist.step.local_sgd import LocalSGDStep
from kdist.step.step import Step
from kdist.step.step_function import StepFunction, TracedRows
from kdist.step.step_logs import measured_logs
from kdist.step.train_step import TrainStep
from kdist.trainer.feeding.given_rows import given_rows, with_one_row, with_unknown_numbers
from kdist.trainer.predictions import gather_rows
from kdist.trainer.replicated_session import ReplicatedSession


class ReplicatedSteps:
    """The steps that replace those of one model, what traces them, and the logs of their results."""

    def __init__(self, session: ReplicatedSession) -> None:
        self.session = session
        self.dense_outputs: list[bool] = []  # of the last prediction: which of its leaves the model made dense
        self._model = session.model
        self._engine = session.engine
        self._extended = session.strategy.extended
        self._compiled_steps = CompiledSteps(session.model)
        self._results: dict[str, dict[str, Callable[[], Any]]] = {}
        steps = {"train_step": self.train_step, "test_step": self.test_step, "predict_step": self.predict_step}
        self._custom_steps = CustomSteps(session.model, steps)
        self._traced_rows = {name: TracedRows(are_unknown=name == "predict_step") for name in steps}

    def install(self) -> None:
        """Sets the steps on the instance, and what traces them and logs their results."""
        makers = {MAKE_FUNCTION: self._make_function, "make_predict_function": self._make_predict_function}
        patch_methods(self._model, {**makers, EPOCH_LOGS: self._epoch_logs})
        self._custom_steps.patch()

    def begin_call(self) -> None:
        """Replaces steps that the user has set on the instance since, and keeps Keras from compiling whole ones."""
        if not self.session.running_methods and not has_extensions(self._model):
            self._custom_steps.patch()
        self._compiled_steps.disable_keras_compilation()

    def _make_function(self, step: Callable[..., Any]) -> StepFunction:
        rows = self._traced_rows["test_step" if step == self._model.test_step else "train_step"]
        if computes_custom_loss(self._model):
            rows.hide_row_count()
        return StepFunction(self._model, functools.partial(original(self._model, MAKE_FUNCTION), step), rows)

    def _make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        before = self._model.predict_function
        result = original(self._model, "make_predict_function")(*args, **kwargs)
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
        """Trains on this rank's share of a batch.

        Collective: every rank must call this, in the same order.
        """
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
        """Evaluates this rank's share of a batch.

        Collective: every rank must call this, in the same order.
        """
        if self._extended.step is not None:
            return self._custom_steps.get("test_step")(data)
        is_shard = isinstance(data, Shard)
        step = Step(
            self._extended,
            self._share(data, "test_step"),
            traced_rows=self._traced_rows["test_step"],
            written=self.session.written,
            is_traced_alike=is_shard,
        )
        with self._traced_rows["test_step"].tracing(), self._counting_by_itself(is_shard=is_shard):
            return self._measured_step("test_step", step, is_whole_pass=not is_shard)

    def predict_step(self, data: Any) -> Any:
        """Predicts this rank's share, and returns all ranks' predictions in the order of the rows.

        Collective: every rank must call this, in the same order.
        """
        if self._extended.step is not None:
            return self._custom_steps.get("predict_step")(data)
        step = Step(
            self._extended, self._share(data, "predict_step"), written=self.session.written, is_traced_alike=False
        )
        with step.running(self._model):
            outputs = self._custom_steps.get("predict_step")(step.data)
        leaves = keras.tree.flatten(outputs)
        self.dense_outputs = [not isinstance(leaf, tf.RaggedTensor) for leaf in leaves]
        widths_differ = self.session.feed.widths_differ
        gathered = [gather_rows(self._engine, step, leaf, widths_differ=widths_differ) for leaf in leaves]
        return keras.tree.pack_sequence_as(outputs, gathered)

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

    def _epoch_logs(self, logs: Any) -> Any:
        """Returns an epoch's logs, with the results of the summed metrics.

        Collective: every rank must call this, in the same order.
        """
        name = "train_step" if self.session.running_methods[-1] == "fit" else "test_step"
        if isinstance(logs, dict) and not logs and name == "train_step":  # no step was left in a resumed epoch
            logs = self._results.get(name, self._model.get_metrics_result())
        logs = self._with_results(name, original(self._model, EPOCH_LOGS)(logs))
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
