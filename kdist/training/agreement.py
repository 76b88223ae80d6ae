"""Callbacks around the user's: one state at the beginning, one decision at every step, the rate in the logs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import keras

from kdist.scaling import num_warmup_steps
from kdist.training import state
from kdist.training.optimizers import optimizers_of

if TYPE_CHECKING:
    from kdist.training.backup import Backup
    from kdist.training.replicated_model import ReplicatedModel

logger = logging.getLogger("kdist")


class EffectiveRateLog(keras.callbacks.Callback):
    """Puts the rate that updates take into the logs, before the user's callbacks read them.

    Args:
        owner: the `ReplicatedModel`.
    """

    def __init__(self, owner: ReplicatedModel) -> None:
        super().__init__()
        self._owner = owner

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `effective_learning_rate` where it differs from the user's."""
        rates = self._owner.rates()
        if logs is not None and rates and rates[0].is_scaled:
            logs["effective_learning_rate"] = rates[0].effective()


class Agreement(keras.callbacks.Callback):
    """Makes the ranks begin with one state and decide as one. Runs after the user's callbacks.

    Args:
        owner: the `ReplicatedModel`.
        verb: str, `"fit"`, `"evaluate"` or `"predict"`.
        is_outermost: bool, whether no other verb of the model is running around this one.
        has_company: bool, whether any rank was given a callback, which may have written what others read.

    Attributes:
        backups: list of `Backup`, which take up an interrupted training.
    """

    def __init__(self, owner: ReplicatedModel, verb: str, is_outermost: bool, has_company: bool) -> None:
        super().__init__()
        self._owner = owner
        self._verb = verb
        self._is_outermost = is_outermost
        self._has_company = has_company
        self.backups: list[Backup] = []
        self._is_checked = False
        self._num_steps = 0
        # Before the user's callbacks, which may restore another rate on the chief alone.
        self._given_rates = state.learning_rates(optimizers_of(owner.model)) if verb == "fit" else {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state, after the user's callbacks may have restored it on the chief."""
        owner = self._owner
        state.check_agreement(owner.engine, "the optimizer given to fit", self._given_rates)
        owner.requests.withdraw("stop", "preempt")
        for backup in self.backups:
            backup.begin()
        owner.enter(self._verb)
        steps = self.params.get("steps")
        if steps is not None or not owner.settings.warmup_epochs:  # none is none, whatever the steps are
            for rate in owner.rates():
                if not rate.warmup_is_known:
                    rate.set_warmup(self._warmup_steps(steps or 0))
        self._report()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state."""
        if self._verb == "evaluate" and self._is_outermost:
            self._owner.enter(self._verb)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state."""
        if self._verb == "predict" and self._is_outermost:
            self._owner.enter(self._verb)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets a rank's wish to stop ride in the next step's message, and obeys what rode in this one's."""
        owner = self._owner
        self._num_steps = batch + 1
        if not self._is_checked:
            owner.requests.agree()  # a callback may have set weights on one rank already
        if "weights" in owner.requests.granted:
            owner.take_over_weights()
        if not self._is_checked:
            self._is_checked = True
            if owner.averaging is None:  # which compares when the ranks have come together
                state.check_equal(owner.engine, {v.path: v for v in self.model.trainable_variables})
        if "stop" in owner.requests.granted:
            self.model.stop_training = True
        elif self.model.stop_training:
            owner.requests.ask("stop")
            self.model.stop_training = False
        owner.requests.send()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees at once: between epochs no message is due that the wish could ride in."""
        rates = self._owner.rates()
        for rate in rates:
            if not rate.warmup_is_known:
                rate.set_warmup(self._warmup_steps(self._num_steps))
        for rate, requests in zip(rates, self._owner.engine.allreduce([rate.request() for rate in rates]), strict=True):
            rate.agree(requests)
        self._owner.agree()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Agrees for the last time, when all callbacks have ended: whoever reads now finds what they wrote."""
        self._owner.agree()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the callbacks' files are there."""
        if self._verb == "evaluate" and self._is_outermost and self._has_company:
            self._owner.engine.barrier()

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the callbacks' files are there."""
        if self._verb == "predict" and self._is_outermost and self._has_company:
            self._owner.engine.barrier()

    def _warmup_steps(self, steps_per_epoch: int) -> float:
        return num_warmup_steps(self._owner.settings.warmup_epochs, self.params.get("epochs", 1), steps_per_epoch)

    def _report(self) -> None:
        """Says once, before the first step, what is scaled: old, new, by which rule and why."""
        owner = self._owner
        unsaid = [rate for rate in owner.rates() if not rate.is_reported]
        for rate in unsaid:
            rate.is_reported = True
        if owner.engine.rank != 0 or not unsaid:
            return
        size, settings = owner.engine.size, owner.settings
        if not settings.auto_shard:
            logger.info("data: each of %d ranks brings its own (auto_shard=False)", size)
        elif settings.scale_batch:
            together = "" if settings.sync_every > 1 else f": the global batch is {size} times as large"
            logger.info("batch: %d replicas, each with a batch of its own%s", size, together)
        else:
            logger.info("batch: each is split over %d replicas (scale_batch=False)", size)
        if settings.sync_every > 1:
            logger.info(
                "sync_every: each rank makes %d steps by itself before all average their weights: another training "
                "than that of one process", settings.sync_every,
            )  # fmt: skip
        for rate in unsaid:
            name, rule = type(rate.optimizer).__name__, rate.rule
            if not rule.is_known:
                logger.warning("learning rate: %s, so it is left alone; give scale_lr a rule or a number", rule.why)
            elif not rate.is_scaled:
                why = "each rank's steps are on its own batches" if settings.sync_every > 1 else rule.why
                logger.info("learning rate of %s: unchanged: %s", name, why)
            else:
                rates = state.learning_rates([rate.optimizer]).values()  # none for a schedule
                logger.info(
                    "learning rate of %s: %stimes %.4g by the %s rule (%s), %s; "
                    "`optimizer.learning_rate` stays yours, the logs have `effective_learning_rate`. "
                    "Settings counted in batches (save_freq, update_freq, EMA, accumulation) are left alone.",
                    name, "".join(f"{old:.4g} becomes {old * rule.factor:.4g}, " for old in rates),
                    rule.factor, rule.name, rule.why,
                    rate.warmup,
                )  # fmt: skip
