"""Callbacks before and after the user's: they broadcast the state, exchange votes and log the learning rate."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist.checkpoint.backup_and_restore import BackupAndRestore
from kdist.keras_hooks.optimizers import optimizers_of
from kdist.reports.log import once
from kdist.restarts.events import own_reports
from kdist.state.comparison import learning_rates
from kdist.trainer.replicated_session import ReplicatedSession


class EffectiveRateLog(keras.callbacks.Callback):
    """Adds the effective learning rate to the logs, before the user's callbacks read them."""

    def __init__(self, session: ReplicatedSession) -> None:
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `effective_learning_rate` if it differs from the user's rate."""
        self._session.effective_rates.add_to_logs(logs)


class RankSynchronization(keras.callbacks.Callback):
    """Broadcasts the state at the beginning, and exchanges votes. Runs after the user's callbacks.

    Args:
        session: `ReplicatedSession`.
        method: str, the one that uses the list.
        is_outermost: bool, whether no other method of the model runs.
        any_callbacks: bool, whether any rank was given a callback.
        stops_at_once: bool, whether votes are exchanged after each step, so that training stops after the same step as
            in one process. They are sent in the next step's message else.
        may_end_passes: bool, whether a callback may end an evaluation or a prediction between two steps.

    Attributes:
        backups: list of `BackupAndRestore`.
    """

    def __init__(
        self,
        session: ReplicatedSession,
        method: str,
        is_outermost: bool,
        any_callbacks: bool,
        *,
        stops_at_once: bool,
        may_end_passes: bool,
    ) -> None:
        super().__init__()
        self._session = session
        self._method = method
        self._is_outermost = is_outermost
        self._any_callbacks = any_callbacks
        self._stops_at_once = stops_at_once
        self._may_end_passes = may_end_passes
        self.backups: list[BackupAndRestore] = []
        self._is_checked = False
        self._num_steps = 0
        # Before the user's callbacks, which may restore another rate on the chief only.
        self._given_rates = learning_rates(optimizers_of(session.model)) if method == "fit" else {}

    def before_user_callbacks(self) -> None:
        """Makes the state equal on all ranks, that of a resumed training, before a user's callback looks at it.

        Collective: every rank must call this, in the same order.
        """
        for backup in self.backups:
            backup.before_user_callbacks()
        self._session.broadcast_state(self._method, self._given_rates)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state, which the user's callbacks may have restored on the chief."""
        session = self._session
        session.votes.withdraw("stop", "preempt")
        for backup in self.backups:
            backup.begin()
        session.broadcast_state(self._method, self._given_rates)
        rates = session.effective_rates
        rates.notice_fewer_steps()
        rates.set_warmup(session.settings.warmup_epochs, self.params, self.params.get("steps"))
        if session.engine.rank == 0 and len(rates.all()) == 1:
            self._report_settings()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Exchanges votes: a stop that a callback asks for here ends the training after the first step."""
        self._session.agree_to_stop()
        if "weights" in self._session.votes.agreed:
            self._session.broadcast_loaded_weights()
        # Not when an epoch ends: a callback may have swapped averages in on the chief, until now.
        self._compare_weights()
        self._session.effective_rates.notice_fewer_steps()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state, unless this is the validation of `fit`."""
        if self._method != "fit" and self._is_outermost:
            self._session.broadcast_state(self._method)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the files of callbacks are written."""
        if self._method != "fit" and self._is_outermost and self._any_callbacks:
            self._session.engine.barrier()

    on_predict_begin, on_predict_end = on_test_begin, on_test_end

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the evaluation on all ranks, if one has asked."""
        self._session.engine.activity.end_batch()
        self._end_together("stop_evaluating")

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the prediction on all ranks, if one has asked."""
        self._session.engine.activity.end_batch()
        self._end_together("stop_predicting")

    def _end_together(self, flag: str) -> None:
        if self._may_end_passes:
            (count,) = self._session.engine.allreduce([tf.constant(int(getattr(self.model, flag)), tf.int32)])
            setattr(self.model, flag, bool(count > 0))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the steps of the epoch that are made: a resumed one may have no other."""
        self._num_steps = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Applies the votes of this step's message, and writes this rank's votes for the next one."""
        session = self._session
        session.engine.activity.end_batch()
        self._num_steps = batch + 1
        if self._stops_at_once or not self._is_checked:  # a callback may have set weights on one rank already
            session.votes.withdraw("stop")  # of before this step: the flag may be set back
            session.agree_to_stop()
        if "weights" in session.votes.agreed:
            session.broadcast_loaded_weights()
        if not self._is_checked:
            self._is_checked = True
            own_reports.made_step()
            if session.engine.rank == 0 and len(session.rates()) > 1:  # by now it is known which ones update
                self._report_settings()
            if session.local_sgd is None:  # which compares after its first average
                session.common_state.check_first_step()
        if "stop" in session.votes.agreed:
            self.model.stop_training = True
        elif self.model.stop_training:
            session.votes.cast("stop")
            self.model.stop_training = False
        session.votes.send()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Exchanges votes and learning rates at once."""
        session = self._session
        num_steps = self._num_steps + session.counts_ended_step
        session.effective_rates.set_warmup(session.settings.warmup_epochs, self.params, num_steps)
        session.agree(session.rates())
        session.votes.withdraw("stop")  # the flag says it
        session.common_state.make_buffers_equal()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchanges votes, which also waits until the files of callbacks are written, and compares weights."""
        self._session.agree()
        self._session.votes.withdraw("stop")
        self._compare_weights()

    def _compare_weights(self) -> None:
        if self._any_callbacks:
            self._session.make_weights_equal()

    def _report_settings(self) -> None:
        """Logs how batches are distributed, and the learning rates."""
        session = self._session
        size, settings = session.engine.size, session.settings
        source = session.feed.training.data_adapter.source
        batch = source.batch_size  # of arrays
        sync_every = settings.options.sync_every
        if not settings.auto_shard:
            once.info(f"data: each of {size} ranks has its own (auto_shard=False)")
        elif (number := settings.micro_batches) is not None:
            most, _ = source.batches_in_steps or (number, number)
            each = f"{batch} x {most} = {batch * most}" if batch else f"{most} of yours"
            once.info(f"batch: {each} on {size} rank{'s' * (size > 1)} (micro_batches={number})")
        elif settings.scale_batch:
            most, _ = source.batches_in_steps or (size, size)
            each = f"{batch} x {size} ranks = {batch * size}" if batch else f"one of yours x {size} ranks"
            if most < size:  # an epoch has no more
                given = f"{batch} x {most} = {batch * most}, split over" if batch else f"{most} of yours on"
                each = f"{given} {size} ranks: an epoch has {most} batch{'es' * (most > 1)}"
            once.info(
                f"batch: {each}" if sync_every == 1 else f"batch: {batch or 'one of yours'} on each of {size} ranks"
            )
            if own_reports.is_resized:
                once.warning(
                    "the number of ranks may change, and the global batch with it. Received: scale_batch=True, and "
                    "--min-np, --max-np or --heal. Expected a global batch that stays. Fix: "
                    f"kdist.scope(micro_batches={size}), by which a step is {size} of your batches on any number of "
                    "ranks; kdist.scope(scale_batch=False); or batch_size=GLOBAL_BATCH // kdist.size(), with which "
                    "this can be ignored."
                )
        else:
            each = f"{batch} / {size} ranks = {batch / size:g}" if batch else f"each of yours / {size} ranks"
            once.info(f"batch: {each} (scale_batch=False)")
        if settings.auto_shard and batch and source.cardinality:
            _warn_of_idle_ranks(min(source.plan.group_size * batch, source.cardinality), size)
        if sync_every > 1:
            once.info(
                f"sync_every: each rank makes {sync_every} local steps between two averages of the weights: results "
                "differ from those of one process"
            )
        session.effective_rates.report(
            "local SGD steps are on each rank's own batch" if session.local_sgd is not None else ""
        )


def _warn_of_idle_ranks(rows: int, size: int) -> None:
    if rows < size:
        once.warning(
            f"there are more ranks than samples in a step: {size - rows} of {size} ranks train on none. Received: "
            f"{rows} sample{'s' * (rows > 1)} in the largest step. Expected one or more for each rank. Fix: kdist run "
            f"-np {rows}, or larger batches or data."
        )
