"""Models under a strategy of TensorFlow's own: batch and learning rate follow its replicas, the rest is Keras'."""

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
from kdist.data.merged import MergedPyDataset, merged_batches, merged_dataset
from kdist.scaling import num_warmup_steps
from kdist.training import _keras_internals as internals
from kdist.training.arguments import like, named_arguments
from kdist.training.learning_rate import EffectiveRate, EffectiveRates
from kdist.training.optimizers import innermost, optimizers_of

logger = logging.getLogger("kdist")

_DEFAULT_BATCH_SIZE = 32  # Keras' own


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What `kdist.scope` was told, and the replicas of the strategy that it entered.

    Attributes:
        size: int, the number of replicas.
        scale_batch: bool, whether `batch_size` is what each replica sees.
        scale_lr: as `kdist.scope` takes it.
        warmup_epochs: as `kdist.scope` takes it.
    """

    size: int
    scale_batch: bool
    scale_lr: str | float | None
    warmup_epochs: str | float


@contextlib.contextmanager
def scaled_models(scaling: Scaling) -> Iterator[None]:
    """Makes the models that are made or used while the context is open follow the replicas, if anything is to.

    Args:
        scaling: `Scaling` of the scope.
    """
    if scaling.size == 1 or (not scaling.scale_batch and scaling.scale_lr is None):
        yield
        return
    with internals.watch_models(lambda model: scale(model, scaling), lambda model, verb: scale(model, scaling)):
        yield


def scale(model: keras.Model, scaling: Scaling) -> None:
    """Makes a model's `fit` scale batch and learning rate, once.

    Args:
        model: `keras.Model`, built or not, compiled or not.
        scaling: `Scaling` of the scope.
    """
    if "_kdist" not in model.__dict__:
        model.__dict__["_kdist"] = scaled = ScaledModel(model, scaling)
        for name in internals.VERBS:
            model.__dict__[name] = like(getattr(type(model), name), functools.partial(scaled.as_it_is, name))
        model.__dict__["fit"] = like(type(model).fit, scaled.fit)


class ScaledModel:
    """What kdist keeps beside one model.

    Args:
        model: `keras.Model`.
        scaling: `Scaling` of the scope.
    """

    def __init__(self, model: keras.Model, scaling: Scaling) -> None:
        self.model = model
        self.scaling = scaling
        self.rates = EffectiveRates(
            model, scale_lr=scaling.scale_lr, scale_batch=scaling.scale_batch, size=scaling.size
        )

    def as_it_is(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Calls what the model's class has for a verb."""
        return getattr(type(self.model), verb)(self.model, *args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Fits with N times the batch and the rate that its rule gives."""
        original = type(self.model).fit.__get__(self.model)
        given = named_arguments(inspect.signature(original).bind(*args, **kwargs))
        if self.scaling.scale_batch:
            scale_data(given, self.scaling.size)
        callbacks = given.get("callbacks")
        ours = ScaledRate(self)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            if not any(isinstance(each, ScaledRate) for each in callbacks.callbacks):
                ours.set_params(callbacks.params)
                ours.set_model(self.model)
                callbacks.callbacks.append(ours)
        else:
            given["callbacks"] = [ours, *keras.tree.flatten(callbacks or [])]
        for rate in self.rates.all():
            if rate.is_scaled or rate.follows_schedule:
                rate.optimizer.__dict__["_get_current_learning_rate"] = functools.partial(_rate_in_a_step, rate)
        self._say_where_keras_departs()
        return original(**given)

    def _say_where_keras_departs(self) -> None:
        for optimizer in map(innermost, optimizers_of(self.model)):
            settings = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(optimizer, name, None)]
            if settings:
                logger.warning(
                    "%s of %s acts on each replica's own gradients, before they are summed: not as in one process. "
                    "Fix: one process a device, by `kdist run`, where gradients are clipped after the sum",
                    ", ".join(settings), type(optimizer).__name__,
                )  # fmt: skip


def _rate_in_a_step(rate: EffectiveRate) -> Any:
    """Returns the scaled rate to an update, and the user's to whoever else asks."""
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if in_replica or is_updating():  # gradients are applied in the one, and weights decay in the other
        return rate.current()
    return type(rate.optimizer)._get_current_learning_rate(rate.optimizer)


def scale_data(given: dict[str, Any], count: int) -> None:
    """Makes the arguments of a `fit` train on `count` consecutive batches of the user's at once.

    Args:
        given: dictionary of the arguments by name, which is changed. Validation data is left as it is.
        count: int, the number of replicas.
    """
    data = given.get("x")
    if isinstance(data, tf.data.Dataset):
        given["x"] = merged_dataset(data, count)
    elif isinstance(data, keras.utils.PyDataset):
        given["x"] = MergedPyDataset(data, count)
    elif isinstance(data, Iterator):
        logger.warning(
            "data: under this strategy Keras draws the first batch of a generator before it trains, and loses it"
        )
        given["x"] = merged_batches(data, count)
    elif type(data).__module__.startswith("torch.utils.data"):
        logger.warning("batch: a DataLoader's own batches are split over %d replicas, not multiplied by them", count)
        return
    else:
        # Keras takes it for the batch size of the validation as well.
        given["batch_size"] = count * (given.get("batch_size") or _DEFAULT_BATCH_SIZE)
    if steps := given.get("steps_per_epoch"):
        given["steps_per_epoch"] = -(-steps // count)
        if steps % count:
            logger.warning(
                "steps_per_epoch=%d of your batches are no whole number of steps of %d replicas: an epoch takes %d",
                steps, count, given["steps_per_epoch"] * count,
            )  # fmt: skip


class ScaledRate(keras.callbacks.Callback):
    """Sets the warm-up, says what is scaled, and logs the rate that updates take.

    Args:
        owner: the `ScaledModel`.
    """

    def __init__(self, owner: ScaledModel) -> None:
        super().__init__()
        self._owner = owner
        self._num_steps = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the warm-up where the steps are known, and reports."""
        scaling, steps = self._owner.scaling, self.params.get("steps")
        if steps is not None or not scaling.warmup_epochs:  # none is none, whatever the steps are
            self._set_warmup(steps or 0)
        for rate in self._owner.rates.all():
            if not rate.is_reported:
                rate.is_reported = True
                how = "times as large" if scaling.scale_batch else "split (scale_batch=False)"
                logger.info("batch: %d replicas in one process: %s", scaling.size, how)
                logger.info(
                    "learning rate of %s: times %.4g (%s)",
                    type(rate.optimizer).__name__,
                    rate.rule.factor,
                    rate.rule.why,
                )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        self._num_steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `effective_learning_rate` where it differs from the user's."""
        self._set_warmup(self._num_steps)
        rates = self._owner.rates.all()
        if logs is not None and rates and rates[0].is_scaled:
            logs["effective_learning_rate"] = rates[0].effective()

    def _set_warmup(self, steps_per_epoch: int) -> None:
        epochs = self.params.get("epochs", 1)
        for rate in self._owner.rates.all():
            if not rate.warmup_is_known:
                rate.set_warmup(num_warmup_steps(self._owner.scaling.warmup_epochs, epochs, steps_per_epoch))
