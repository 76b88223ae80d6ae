"""Models under a strategy of TensorFlow's own: batch and learning rate scale with its replicas, the rest is Keras'."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import is_updating
from kdist.keras_hooks.optimizers import CURRENT_RATE, current_learning_rate, innermost, optimizers_of
from kdist.keras_hooks.patching import VERBS, patch
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import original, patch_methods, watch_models
from kdist.scaling import num_warmup_steps
from kdist.state.part import StatePart
from kdist.state.session import TrainingSession, has_session, set_session
from kdist.state.single_process import KerasData
from kdist.state.variables import ModelState
from kdist.step.learning_rate import EffectiveRate, EffectiveRates
from kdist.tf_strategies.global_batches import with_global_batches

logger = logging.getLogger("kdist")


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """How batch and learning rate scale with the replicas of a strategy.

    Attributes:
        num_replicas: int, the number of replicas.
        scale_batch: bool, whether `batch_size` is what each replica sees.
        scale_lr: as `kdist.scope` takes it.
        warmup_epochs: as `kdist.scope` takes it.
    """

    num_replicas: int
    scale_batch: bool
    scale_lr: str | float | None
    warmup_epochs: str | float

    @property
    def batches_per_step(self) -> int:
        """The number of the user's batches in a step."""
        return self.num_replicas if self.scale_batch else 1


@contextlib.contextmanager
def scaled_models(options: ScalingOptions) -> Iterator[None]:
    """Scales batch and learning rate of the models that are made or used while the context is open.

    Args:
        options: `ScalingOptions`; there may be nothing to scale.
    """
    if options.num_replicas == 1 or (not options.scale_batch and options.scale_lr is None):
        yield
        return

    def scale(model: keras.Model) -> None:
        if not has_session(model):
            session = ScaledSession(model, options)
            set_session(model, session)
            patch_methods(model, {**{name: original(model, name) for name in VERBS}, "fit": session.fit})

    with watch_models(scale, lambda model, verb: scale(model)):
        yield


class ScaledSession(TrainingSession):
    """The session of one model that trains under a strategy of TensorFlow's.

    Args:
        model: `keras.Model`.
        options: `ScalingOptions`.
    """

    def __init__(self, model: keras.Model, options: ScalingOptions) -> None:
        super().__init__(model)
        self._options = options
        self._rates = EffectiveRates(model, scale_lr=options.scale_lr, batches_per_step=options.batches_per_step)
        # A variable, because `train_on_batch` may take the function that `fit` has traced. A callback may call `fit`.
        self._num_fits = tf.Variable(0, trainable=False, name="kdist_running_fits")

    def parts(self) -> list[StatePart]:
        """See `TrainingSession.parts`."""
        return [ModelState(self.model), self._rates]

    def data(self, epoch_step: int = 0) -> KerasData:
        """See `TrainingSession.data`."""
        batches = self._options.batches_per_step
        return KerasData(self.model, self.metrics, epoch_step, batches_per_step=batches)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Fits with global batches and the scaled learning rate."""
        fit = original(self.model, "fit")
        arguments = named_arguments(inspect.signature(fit).bind(*args, **kwargs))
        if self._options.scale_batch:
            arguments = with_global_batches(arguments, self._options.num_replicas)
        callbacks = arguments.get("callbacks")
        warmup = WarmupCallback(self._options, self._rates)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [warmup, *keras.tree.flatten(callbacks or [])]
        elif not any(isinstance(each, WarmupCallback) for each in callbacks.callbacks):
            warmup.set_params(callbacks.params)
            warmup.set_model(self.model)
            callbacks.callbacks.append(warmup)
        for rate in self._rates.all():
            if rate.is_scaled or rate.follows_schedule:
                patch(rate.optimizer, CURRENT_RATE, functools.partial(_rate_in_update, rate, self._num_fits))
        self._warn_of_clipping()
        self._num_fits.assign_add(1)
        try:
            return fit(**arguments)
        finally:
            self._num_fits.assign_sub(1)

    def _warn_of_clipping(self) -> None:
        for optimizer in map(innermost, optimizers_of(self.model)):
            settings = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(optimizer, name, None)]
            if settings:
                logger.warning(
                    "%s of %s clips each replica's own gradients, before they are summed: not as in one process. "
                    "Fix: one process a device, by `kdist run`, where gradients are clipped after the sum",
                    ", ".join(settings), type(optimizer).__name__,
                )  # fmt: skip


def _rate_in_update(rate: EffectiveRate, num_fits: tf.Variable) -> Any:
    """Returns the scaled rate within an update while `fit` runs, and the user's elsewhere."""
    own = current_learning_rate(rate.optimizer)
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if in_replica or is_updating():  # gradients are applied in the one, and weights decay in the other
        return tf.where(num_fits > 0, rate.current(), own)
    return own


class WarmupCallback(keras.callbacks.Callback):
    """Sets the warm-up, reports once what is scaled, and logs the rate that updates use.

    Args:
        options: `ScalingOptions`.
        rates: `EffectiveRates` of the model.
    """

    def __init__(self, options: ScalingOptions, rates: EffectiveRates) -> None:
        super().__init__()
        self._options = options
        self._rates = rates
        self._num_steps = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the warm-up where the steps are known, and reports."""
        options, steps = self._options, self.params.get("steps")
        if steps is not None or not options.warmup_epochs:  # without warm-up epochs the steps do not matter
            self._set_warmup(steps or 0)
        for rate in self._rates.all():
            if not rate.is_reported:
                rate.is_reported = True
                how = "times as large" if options.scale_batch else "split (scale_batch=False)"
                logger.info("batch: %d replicas in one process: %s", options.num_replicas, how)
                name, rule = type(rate.optimizer).__name__, rate.rule
                logger.info("learning rate of %s: times %.4g (%s)", name, rule.factor, rule.why)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        self._num_steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `effective_learning_rate` where it differs from the user's."""
        self._set_warmup(self._num_steps)
        rates = self._rates.all()
        if logs is not None and rates and rates[0].is_scaled:
            logs["effective_learning_rate"] = rates[0].effective()

    def _set_warmup(self, steps_per_epoch: int) -> None:
        epochs = self.params.get("epochs", 1)
        for rate in self._rates.all():
            if not rate.warmup_is_known:
                rate.set_warmup(num_warmup_steps(self._options.warmup_epochs, epochs, steps_per_epoch))
