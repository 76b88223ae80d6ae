"""The state of a training by Keras' own code in one process: where it is in the schedule and in the data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from kdist.keras_hooks.fit.callbacks import add_steps_of_pass, running_epoch_iterator, steps_of_pass
from kdist.keras_hooks.optimizers import innermost, iterations, optimizers_of, stored_learning_rate
from kdist.keras_hooks.trainer import build_symbolically
from kdist.state.metrics import MetricReducer
from kdist.state.part import Place, State, StatePart
from kdist.state.random_state import random_state, set_random_state

_REPLAY = "_kdist_replay"


class KerasSchedule(StatePart):
    """The step of a `LearningRateSchedule`: one process counts it by the optimizer's iterations."""

    name = "rates"

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def state_dict(self) -> State:
        """Returns nothing: the iterations are saved with the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the iterations to the user's step that a job of several ranks has reached with each optimizer."""
        for optimizer, rate in zip(map(innermost, optimizers_of(self._model)), state.get("rates", []), strict=False):
            if isinstance(stored_learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
                iterations(optimizer).assign(round(rate["user_steps"]))


class KerasData(StatePart):
    """The position in data that Keras iterates: resuming draws the batches of earlier steps without training.

    Attributes:
        place: `Place`, once a state is loaded.
    """

    name = "data"

    def __init__(
        self, model: keras.Model, metrics: MetricReducer, epoch_step: int = 0, *, batches_per_step: int = 1
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._epoch_step = epoch_step
        self._batches_per_step = batches_per_step
        self._steps_before = 0
        self.place = Place(0, "its beginning")

    def state_dict(self) -> State:
        """Returns the steps of the epoch and of the pass, and the size of a step; other positions are not known."""
        iterator = running_epoch_iterator(self._model)
        return {
            "position": None,
            "epoch step": self._epoch_step,
            "pass step": steps_of_pass(iterator),
            "rows": _batch_size(iterator),
            "batches": self._batches_per_step,
        }

    def is_of_other_data(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a state was saved in a `fit` on other rows: of one process nothing is known."""
        del state
        return False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets `place`; `replay` goes there."""
        if state["position"] is not None:
            if state["epoch step"]:
                self.place = Place(
                    0, "which starts again: one process cannot reproduce the order of the data on several ranks"
                )
            return
        iterator = running_epoch_iterator(self._model)
        saved, step = state["epoch step"], self._converted(state, state["epoch step"], iterator)
        if iterator is not None and iterator.steps_per_epoch:
            before = self._converted(state, state.get("pass step", 0), iterator)
            self._steps_before = max(0, before - step)
        change = f": {saved} step(s) of other batches correspond to {step}" if step != saved else ""
        if step or self._steps_before:
            earlier = f", and {self._steps_before} of earlier epochs" if self._steps_before else ""
            self.place = Place(
                step,
                f"after {step} step(s){change}, whose batches{earlier} are drawn again without training: the rest of "
                "the epoch is the same if the input is seeded",
            )

    def _converted(self, state: Mapping[str, Any], step: int, iterator: Any) -> int:
        """Returns the step of this `fit` at a step of the saved one; if none begins there, the one before."""
        before, now = state.get("rows"), _batch_size(iterator)
        if not before or not now:
            before, now = state.get("batches", self._batches_per_step), self._batches_per_step
        if before == now:
            return step
        step = step * before // now
        return step - step % self._model.steps_per_execution

    @property
    def needs_replay(self) -> bool:
        """Whether batches are to be drawn before the first new step."""
        return bool(self.place.epoch_step or self._steps_before)

    def replay(self) -> None:
        """Draws the batches of the earlier steps of this pass without training."""
        self._model.train_function = vars(self._model)[_REPLAY] = _Replay(
            self._model, self.place.epoch_step, self._steps_before, self._metrics
        )

    def end(self) -> None:
        """Ends the replay, if it has not: the epoch has no more steps now."""
        if _REPLAY in vars(self._model):
            vars(self._model)[_REPLAY].end()


class _Replay:
    """Replaces a model's `train_function` until the batches of earlier steps are drawn."""

    def __init__(self, model: keras.Model, num_steps: int, steps_before: int, metrics: MetricReducer) -> None:
        self._model = model
        self.num_steps = num_steps  # of the epoch
        self._steps_before = steps_before  # of the pass, in earlier epochs
        self._metrics = metrics
        self._train: Callable[..., Any] = model.train_function
        self.fit = model.history  # new for each `fit`: an earlier one may have raised

    def __call__(self, iterator: Any) -> Any:
        # Another callback's wrapper may call it later.
        if vars(self._model).get(_REPLAY) is not self or self.fit is not self._model.history:
            return self._train(iterator)
        try:
            self._draw_earlier_epochs(iterator)
            if self.num_steps > 0:
                return self._draw(iterator)
        except BaseException:
            self.end()
            raise
        self.end()
        return self._train(iterator)

    def _draw_earlier_epochs(self, iterator: Any) -> None:
        if not self._steps_before:
            return
        state = random_state()
        for _ in range(self._steps_before):
            next(iterator)
        set_random_state(state)
        if (running := running_epoch_iterator(self._model)) is not None:
            add_steps_of_pass(running, self._steps_before)
        self._steps_before = 0

    def _draw(self, iterator: Any) -> Any:
        batches = [next(iterator) for _ in range(self._model.steps_per_execution)]
        if self._metrics.is_incomplete:
            # Without a strategy Keras makes metrics in the first step; a custom step may make others.
            with contextlib.suppress(RuntimeError, ValueError, TypeError, NotImplementedError):
                build_symbolically(self._model, batches[0])
        self.num_steps -= self._model.steps_per_execution
        if self.num_steps <= 0:
            self.end()
        self._metrics.restore()
        return self._model.get_metrics_result()

    def end(self) -> None:
        """Trains again."""
        vars(self._model).pop(_REPLAY, None)
        if self._model.train_function is self:
            self._model.train_function = self._train


def _batch_size(iterator: Any) -> int | None:
    """Returns the rows of a batch; `None` if they are not known, as where the data has a scalar."""
    # Keras reads them off a dataset's first leaf, whatever that is.
    with contextlib.suppress(AttributeError, IndexError, NotImplementedError, TypeError, ValueError):
        return int(iterator.data_adapter.batch_size)
    return None


def is_replaying(model: keras.Model) -> bool:
    """Returns whether the next step was made before the interruption, and is not trained again."""
    replay = vars(model).get(_REPLAY)
    return replay is not None and replay.fit is model.history and replay.num_steps > 0
