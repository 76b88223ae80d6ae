"""From the place where a training was saved to the same place in the data that `fit` has been given now."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.training import snapshot
from kdist.training.checkpoint_files import Checkpoint
from kdist.training.optimizers import innermost
from kdist.training.position import Position
from kdist.training.sources import holds_random_state

if TYPE_CHECKING:
    from kdist.training.replicated_model import ReplicatedModel


@dataclasses.dataclass(frozen=True)
class Place:
    """Where training begins.

    Attributes:
        epoch_step: int, how many steps of the epoch have been made.
        description: str, for the log.
        change: str, what another number of ranks makes of it, for the log.
    """

    epoch_step: int
    description: str
    change: str = ""


def begin(model: keras.Model, owner: ReplicatedModel | None, checkpoint: Checkpoint) -> Place:
    """Goes to the place in the data where a training was saved.

    Args:
        model: `keras.Model`, whose `fit` has begun.
        owner: its `ReplicatedModel`, or `None` in one process.
        checkpoint: `Checkpoint`.
    """
    saved = checkpoint.state
    resume_rates(model, owner, saved)
    if owner is None:
        return _in_keras_own_data(saved)
    if saved["position"] is None:
        if not saved["epoch step"]:
            return Place(0, "its beginning")
        return Place(0, "which begins again: Keras' own order of its data, of one process, is not known here")
    before = Position(**saved["position"])
    data = owner.data.training
    if before.kind != type(data.data_adapter.source).__name__ and before.epoch_step:
        return Place(0, f"which begins again: its data was a {before.kind}, and is something else now")
    now = data.resume(before)
    states = [array.tobytes() for array in snapshot.without_prefix(checkpoint.arrays, "hook/")]
    data.data_adapter.repeat_hooks(list(zip(saved["hooks"], states, strict=True)))
    change = (
        f"Steps of this epoch: {before.epoch_step} were made with {before.group_size} batch(es) each, which is as far "
        f"as {now.epoch_step} with {now.group_size}."
        if before.epoch_step
        else ""
    )
    if not now.epoch_step:
        again = "its beginning" if not before.epoch_step else "its beginning, for less than a step of it was made"
        return Place(0, again, change)
    shares = snapshot.without_prefix(checkpoint.arrays, "metric/")
    if len(shares) == len(model.metrics_variables):
        owner.metrics.resume(shares)
    source = data.data_adapter.source
    how = ""
    if source.draws_in_background or source.follows_iterators:
        how = f": the data is read again from the beginning of the pass, {now.pass_step} step(s) without training"
    return Place(now.epoch_step, f"after {now.epoch_step} step(s) of it{how}", change)


def hooks_of(owner: ReplicatedModel | None, epoch_step: int) -> tuple[list[str], dict[str, Any]]:
    """Returns which hooks of the user's data were called so far, and as arrays in which random states.

    Args:
        owner: the `ReplicatedModel`, or `None` in one process.
        epoch_step: int, the steps that the current epoch has made.
    """
    hooks = [] if owner is None else owner.data.training.data_adapter.hooks
    if epoch_step and hooks:
        hooks = hooks[:-1]  # the beginning of this epoch, with which it will begin again
    arrays = {f"hook/{n}": np.frombuffer(states, np.uint8) for n, (_, states) in enumerate(hooks)}
    return [name for name, _ in hooks], arrays


def resume_rates(model: keras.Model, owner: ReplicatedModel | None, saved: dict[str, Any]) -> None:
    """Lets warm-up and schedules go on from where they were, in the user's own steps."""
    rates = saved["rates"]
    if owner is not None:
        for place, rate in enumerate(owner.rates()):
            rate.resume(rates[place] if rates and place < len(rates) else None)
        return
    optimizer = innermost(getattr(model, "optimizer", None))
    schedule = getattr(optimizer, "_learning_rate", None)
    if optimizer is not None and rates and isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        optimizer._iterations.assign(round(rates[0]["user_steps"]))


def draws_in_background(owner: ReplicatedModel | None) -> bool:
    """Returns whether the user's code draws random numbers in a thread of its own, ahead of training."""
    return owner is not None and holds_random_state(owner.data.training.data_adapter.source)


def is_last(owner: ReplicatedModel | None, params: dict[str, Any], epoch_step: int) -> bool:
    """Returns whether an epoch that has made so many steps is known to be through."""
    if owner is not None:
        return owner.data.training.is_last(epoch_step)
    return params.get("steps") is not None and epoch_step >= params["steps"]


# In one process the data is Keras' own: `fit` holds it, and nobody else gets at it but through `train_function`.


_PASSING_OVER = "_kdist_passing_over"  # where a model has its own


class _PassingOver:
    """Stands for a model's `train_function` until the steps that were made are drawn, without training."""

    def __init__(self, model: keras.Model, num_steps: int, metrics: Sequence[Any]) -> None:
        self._model = model
        self._num_steps = num_steps
        self._metrics = metrics
        self._train: Callable[..., Any] = model.train_function
        self.fit = model.history  # Keras makes a new one for each `fit`: what one has left behind says nothing

    def __call__(self, iterator: Any) -> Any:
        if not is_passing_over(self._model):  # called by what another callback has put around it
            return self._train(iterator)
        try:
            return self._pass_over(iterator)
        except BaseException:
            self._end()
            raise

    def _pass_over(self, iterator: Any) -> Any:
        batches = [next(iterator) for _ in range(self._model.steps_per_execution)]
        if len(self._metrics) != len(self._model.metrics_variables):
            # Outside of a strategy Keras makes metrics in the first step; a step of the user's own may make others.
            with contextlib.suppress(RuntimeError, ValueError, TypeError, NotImplementedError):
                self._model._symbolic_build(data_batch=batches[0])
        self._num_steps -= self._model.steps_per_execution
        if self._num_steps <= 0:
            self._end()
        if len(self._metrics) == len(self._model.metrics_variables):
            for variable, value in zip(self._model.metrics_variables, self._metrics, strict=True):
                variable.assign(value)
        return self._model.get_metrics_result()

    def _end(self) -> None:
        self._model.__dict__.pop(_PASSING_OVER, None)
        if self._model.train_function is self:
            self._model.train_function = self._train


def pass_over(model: keras.Model, saved: Checkpoint) -> None:
    """Makes the steps that a training in one process has made be drawn without training, as the epoch begins."""
    shares = snapshot.without_prefix(saved.arrays, "metric/")
    passing = _PassingOver(model, saved.state["epoch step"], [share[0] for share in shares])
    model.train_function = model.__dict__[_PASSING_OVER] = passing


def is_passing_over(model: keras.Model) -> bool:
    """Returns whether the next step is one that was made before."""
    passing = model.__dict__.get(_PASSING_OVER)
    return passing is not None and passing.fit is model.history


def _in_keras_own_data(saved: dict[str, Any]) -> Place:
    step = saved["epoch step"]
    if not step:
        return Place(0, "its beginning")
    if saved["position"] is not None:
        return Place(0, "which begins again: the order of its data on several ranks is not known in one process")
    return Place(
        step,
        f"after {step} step(s) of it, which are drawn again and passed over: the data is the same where the input "
        "yields the same in this epoch again, as a seeded one does",
    )
