"""Callbacks around the user's: one state at the beginning, one decision at every step, the rate in the logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from kdist.scaling import num_warmup_steps
from kdist.training import state
from kdist.training.step import optimizers_of

if TYPE_CHECKING:
    from kdist.training.replicated_model import ReplicatedModel

logger = logging.getLogger("kdist")

FILE_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Keras' callbacks that only write what others read: the chief's are enough."""


@contextlib.contextmanager
def with_agreement(callbacks: Any, owner: ReplicatedModel, verb: str, is_outermost: bool) -> Iterator[Any]:
    """Gives the callbacks that this rank runs: the user's between kdist's own; file writers on the chief only.

    Args:
        callbacks: a `keras.callbacks.CallbackList`, a list, one callback, or `None`. A `CallbackList` is as it was when
            the context is left.
        owner: the `ReplicatedModel`.
        verb: str, `"fit"`, `"evaluate"` or `"predict"`.
        is_outermost: bool, whether no other verb of the model is running around this one.
    """
    is_container = isinstance(callbacks, keras.callbacks.CallbackList)
    given = callbacks.callbacks if is_container else keras.tree.flatten(callbacks) if callbacks is not None else []
    users = [each for each in given if owner.engine.rank == 0 or not isinstance(each, FILE_WRITERS)]
    first, last = EffectiveRateLog(owner), Agreement(owner, verb, is_outermost)
    if not is_container:
        yield [first, *users, last]
        return
    before = list(given)
    for each in (first, last):
        each.set_params(callbacks.params)
        each.set_model(owner.model)
    callbacks.callbacks[:] = [first, *users, last]
    try:
        yield callbacks
    finally:
        callbacks.callbacks[:] = before


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
    """

    def __init__(self, owner: ReplicatedModel, verb: str, is_outermost: bool) -> None:
        super().__init__()
        self._owner = owner
        self._verb = verb
        self._is_outermost = is_outermost
        self._is_checked = False
        self._num_steps = 0
        # Before the user's callbacks, which may restore another rate on the chief alone.
        self._given_rates = state.learning_rates(optimizers_of(owner.model)) if verb == "fit" else {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state, after the user's callbacks may have restored it on the chief."""
        owner = self._owner
        state.check_agreement(owner.engine, "the optimizer given to fit", self._given_rates)
        owner.enter(self._verb)
        owner.forget_stop()
        for rate in owner.rates():
            if not rate.warmup_is_known and self.params.get("steps") is not None:
                rate.set_warmup(self._warmup_steps(self.params["steps"]))
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
            self._is_checked = True
            state.check_equal(owner.engine, {v.path: v for v in self.model.trainable_variables})
        if owner.stop_is_agreed:
            self.model.stop_training = True
        elif self.model.stop_training:
            owner.stop_requested.assign(1.0)
            self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees at once: between epochs no message is due that the wish could ride in."""
        rates = self._owner.rates()
        for rate in rates:
            if not rate.warmup_is_known:
                rate.set_warmup(self._warmup_steps(self._num_steps))
        for rate, requests in zip(rates, self._owner.engine.allreduce([rate.request() for rate in rates]), strict=True):
            rate.agree(requests)
        self._owner.agree_to_stop()

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
            logger.info(
                "batch: %d replicas, each with a batch of its own: the global batch is %d times as large", size, size
            )
        else:
            logger.info("batch: each is split over %d replicas (scale_batch=False)", size)
        for rate in unsaid:
            name, rule = type(rate.optimizer).__name__, rate.rule
            if not rule.is_known:
                logger.warning("learning rate: %s, so it is left alone; give scale_lr a rule or a number", rule.why)
            elif not rate.is_scaled:
                logger.info("learning rate of %s: unchanged: %s", name, rule.why)
            else:
                rates = state.learning_rates([rate.optimizer]).values()  # none for a schedule
                logger.info(
                    "learning rate of %s: %stimes %.4g by the %s rule (%s), after a warm-up of %s steps; "
                    "`optimizer.learning_rate` stays yours, the logs have `effective_learning_rate`. "
                    "Settings counted in batches (save_freq, update_freq, EMA, accumulation) are left alone.",
                    name, "".join(f"{old:.4g} becomes {old * rule.factor:.4g}, " for old in rates),
                    rule.factor, rule.name, rule.why,
                    f"{float(rate._warmup_steps):.0f}" if rate.warmup_is_known else "a tenth of the epochs'",
                )  # fmt: skip
