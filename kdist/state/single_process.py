"""The state of a training by Keras' own code in one process: where it is in the schedule and in the data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from kdist.keras_hooks.optimizers import innermost, iterations, stored_learning_rate
from kdist.keras_hooks.trainer import build_symbolically
from kdist.state.metrics import MetricReducer
from kdist.state.part import State, StatePart

_REPLAY = "_kdist_replay"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a resumed training begins in its data.

    Attributes:
        epoch_step: int, the steps of the epoch that are made.
        description: str, for the log.
        change: str, how another number of ranks changes it, for the log.
    """

    epoch_step: int
    description: str
    change: str = "batch, learning rate and position in the data are converted"


class KerasSchedule(StatePart):
    """The step of a `LearningRateSchedule`: one process counts it by the optimizer's iterations."""

    name = "rates"

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def state_dict(self) -> State:
        """Returns nothing: the iterations are saved with the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the iterations to the user's step that a job of several ranks has reached with its first optimizer."""
        optimizer = innermost(getattr(self._model, "optimizer", None))
        schedule = stored_learning_rate(optimizer)
        if state.get("rates") and isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            iterations(optimizer).assign(round(state["rates"][0]["user_steps"]))


class KerasData(StatePart):
    """The position in data that Keras iterates: resuming draws the batches of earlier steps without training.

    Attributes:
        place: `Place`, once a state is loaded.
    """

    name = "data"

    def __init__(self, model: keras.Model, metrics: MetricReducer, epoch_step: int = 0) -> None:
        self._model = model
        self._metrics = metrics
        self._epoch_step = epoch_step
        self.place = Place(0, "its beginning")

    def state_dict(self) -> State:
        """Returns the step of the epoch; the position in the data is not known."""
        return {"position": None, "epoch step": self._epoch_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets `place`; `replay` goes there."""
        step = state["epoch step"]
        if step and state["position"] is not None:
            self.place = Place(
                0, "which starts again: one process cannot reproduce the order of the data on several ranks"
            )
        elif step:
            self.place = Place(
                step,
                f"after {step} step(s), whose batches are drawn again without training: the rest of the epoch is the "
                "same if the input is seeded",
            )

    def replay(self) -> None:
        """Draws the batches of the earlier steps of this epoch without training."""
        self._model.train_function = vars(self._model)[_REPLAY] = _Replay(
            self._model, self.place.epoch_step, self._metrics
        )


class _Replay:
    """Replaces a model's `train_function` until the batches of earlier steps are drawn."""

    def __init__(self, model: keras.Model, num_steps: int, metrics: MetricReducer) -> None:
        self._model = model
        self._num_steps = num_steps
        self._metrics = metrics
        self._train: Callable[..., Any] = model.train_function
        self.fit = model.history  # new for each `fit`: an earlier one may have raised

    def __call__(self, iterator: Any) -> Any:
        if not is_replaying(self._model):  # called by another callback's wrapper
            return self._train(iterator)
        try:
            return self._draw(iterator)
        except BaseException:
            self._end()
            raise

    def _draw(self, iterator: Any) -> Any:
        batches = [next(iterator) for _ in range(self._model.steps_per_execution)]
        if self._metrics.is_incomplete:
            # Without a strategy Keras makes metrics in the first step; a custom step may make others.
            with contextlib.suppress(RuntimeError, ValueError, TypeError, NotImplementedError):
                build_symbolically(self._model, batches[0])
        self._num_steps -= self._model.steps_per_execution
        if self._num_steps <= 0:
            self._end()
        self._metrics.restore()
        return self._model.get_metrics_result()

    def _end(self) -> None:
        vars(self._model).pop(_REPLAY, None)
        if self._model.train_function is self:
            self._model.train_function = self._train


def is_replaying(model: keras.Model) -> bool:
    """Returns whether the next step was made before the interruption, and is not trained again."""
    replay = vars(model).get(_REPLAY)
    return replay is not None and replay.fit is model.history
