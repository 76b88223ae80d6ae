"""Models under a strategy of TensorFlow's own: batch and learning rate scale with its replicas, the rest is Keras'."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import is_updating
from kdist.keras_hooks.optimizers import CURRENT_RATE, current_learning_rate, innermost, optimizers_of
from kdist.keras_hooks.patching import METHODS, original, patch
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import patch_methods, watch_models
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.learning_rate.effective_rates import EffectiveRates
from kdist.reports.log import once
from kdist.state.part import StatePart
from kdist.state.session import TrainingSession, has_session, set_session
from kdist.state.single_process import KerasData
from kdist.state.variables import ModelState
from kdist.strategies.settings import Settings
from kdist.tf_strategies.global_batches import with_global_batches


@contextlib.contextmanager
def scaled_models(settings: Settings, num_replicas: int) -> Iterator[None]:
    """Scales batch and learning rate of the models that are made or used while the context is open.

    Args:
        settings: `Settings` of the scope; there may be nothing to scale.
        num_replicas: int, the replicas of the strategy.
    """
    if num_replicas == 1 or (not settings.scale_batch and settings.scale_lr is None):
        yield
        return

    def scale(model: keras.Model) -> None:
        if not has_session(model):
            session = ScaledSession(model, settings, num_replicas)
            set_session(model, session)
            patch_methods(model, {**{name: original(model, name) for name in METHODS}, "fit": session.fit})

    with watch_models(scale, lambda model, method: scale(model)):
        yield


class ScaledSession(TrainingSession):
    """The session of one model that trains under a strategy of TensorFlow's.

    Args:
        model: `keras.Model`.
        settings: `Settings` of the scope.
        num_replicas: int, the replicas of the strategy.
    """

    def __init__(self, model: keras.Model, settings: Settings, num_replicas: int) -> None:
        super().__init__(model)
        self._settings = settings
        self._num_replicas = num_replicas
        self._batches_per_step = settings.batches_per_step(num_replicas)
        self._rates = EffectiveRates(model, scale_lr=settings.scale_lr, batches_per_step=self._batches_per_step)
        # A variable, because `train_on_batch` may take the function that `fit` has traced. A callback may call `fit`.
        self._num_fits = tf.Variable(0, trainable=False, name="kdist_running_fits")

    def parts(self) -> list[StatePart]:
        """See `TrainingSession.parts`."""
        return [ModelState(self.model), self._rates]

    def data(self, epoch_step: int = 0) -> KerasData:
        """See `TrainingSession.data`."""
        return KerasData(self.model, self.metrics, epoch_step, batches_per_step=self._batches_per_step)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Fits with global batches and the scaled learning rate."""
        fit = original(self.model, "fit")
        arguments = named_arguments(inspect.signature(fit).bind(*args, **kwargs))
        grown = with_global_batches(arguments, self._num_replicas) if self._settings.scale_batch else None
        arguments = arguments if grown is None else grown
        self._batches_per_step = 1 if grown is None else self._num_replicas
        once.info(f"batch: {self._batch(grown)}")
        callbacks = arguments.get("callbacks")
        warmup = WarmupCallback(self._settings.warmup_epochs, self._rates)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [warmup, *keras.tree.flatten(callbacks or [])]
        elif not any(isinstance(each, WarmupCallback) for each in callbacks.callbacks):
            warmup.set_params(callbacks.params)
            warmup.set_model(self.model)
            callbacks.callbacks.append(warmup)
        self._rates.set_data((self._batches_per_step, float(self._batches_per_step)))
        for rate in self._rates.all():
            if rate.is_scaled or rate.follows_schedule:
                patch(rate.optimizer, CURRENT_RATE, functools.partial(_rate_in_update, rate, self._num_fits))
        self._warn_of_clipping()
        self._num_fits.assign_add(1)
        try:
            return fit(**arguments)
        finally:
            self._num_fits.assign_sub(1)

    def _batch(self, grown: Mapping[str, Any] | None) -> str:
        """Returns how a `fit` distributes batches, for the log.

        Args:
            grown: mapping, the arguments with global batches, or `None` where they do not grow.
        """
        replicas = self._num_replicas
        if grown is None:
            return f"each of yours / {replicas} replicas" + (
                "" if self._settings.scale_batch else " (scale_batch=False)"
            )
        if size := grown.get("batch_size"):
            return f"{size // replicas} x {replicas} replicas = {size}"
        return f"one of yours x {replicas} replicas"

    def _warn_of_clipping(self) -> None:
        for optimizer in map(innermost, optimizers_of(self.model)):
            settings = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(optimizer, name, None)]
            if settings:
                once.warning(
                    f"{', '.join(settings)} of {type(optimizer).__name__} clips each replica's own gradients, before "
                    "they are summed: not as in one process. Fix: one process a device, by `kdist run`, where "
                    "gradients are clipped after the sum"
                )


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
        warmup_epochs: as `kdist.scope` takes it.
        rates: `EffectiveRates` of the model.
    """

    def __init__(self, warmup_epochs: str | float, rates: EffectiveRates) -> None:
        super().__init__()
        self._warmup_epochs = warmup_epochs
        self._rates = rates
        self._num_steps = 0
        self._is_reported = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the warm-up where the steps are known, and reports the rate of the only optimizer."""
        self._set_warmup(self.params.get("steps"))
        if len(self._rates.all()) == 1:
            self._report()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps, and reports after the first one."""
        self._num_steps = batch + 1
        self._report()  # of several optimizers it is known by now which ones update

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `effective_learning_rate` where it differs from the user's."""
        self._set_warmup(self._num_steps)
        self._rates.add_to_logs(logs)

    def _set_warmup(self, steps_per_epoch: int | None) -> None:
        self._rates.set_warmup(self._warmup_epochs, self.params, steps_per_epoch)

    def _report(self) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._rates.report()
