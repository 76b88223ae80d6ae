"""The training session: what callbacks, checkpoints and steps use of a running training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import ScopeError
from kdist.state.metrics import MetricReducer
from kdist.state.part import StatePart
from kdist.state.single_process import KerasData, KerasSchedule
from kdist.state.variables import ModelState
from kdist.state.votes import Votes

_ATTRIBUTE = "_kdist"


class TrainingSession:
    """The session of a model that one process trains by Keras' own code.

    The sessions of several ranks, of parameter servers and of TensorFlow's strategies derive from it.

    Attributes:
        has_global_logs: bool, whether an epoch's logs are those of all ranks' samples.
        begins_backups: bool, whether the session's model has a callback that calls `begin` of each `BackupAndRestore`.
        runs_update_pipeline: bool, whether the model's training step runs the stages that callbacks add.
    """

    has_global_logs = False
    begins_backups = False
    runs_update_pipeline = False

    def __init__(self, model: keras.Model, engine: Engine | None = None) -> None:
        self.model = model
        self.engine: Engine = SingleEngine() if engine is None else engine
        self.votes = Votes(self.engine)
        self.metrics = MetricReducer(model, self.engine)

    def parts(self) -> list[StatePart]:
        """Returns the parts of the state between two epochs, in the order in which they are saved and loaded."""
        return [ModelState(self.model), KerasSchedule(self.model)]

    def data(self, epoch_step: int = 0) -> Any:
        """Returns the place in the data of the running `fit`, a `StatePart` with a `Place`.

        Args:
            epoch_step: int, the steps that the current epoch has made; 0 between epochs.
        """
        return KerasData(self.model, self.metrics, epoch_step)

    def is_last_step(self, epoch_step: int, params: Mapping[str, Any]) -> bool:
        """Returns whether `epoch_step` is known to be the epoch's last; `params` are Keras' for callbacks."""
        return params.get("steps") is not None and epoch_step >= params["steps"]

    def synchronize(self) -> None:
        """Averages the weights of ranks that train with local SGD.

        Collective: every rank must call this, in the same order.
        """

    @property
    def draws_in_background(self) -> bool:
        """Whether the user's code draws random numbers for the running `fit` in a background thread."""
        return False

    def rates(self) -> Sequence[Any]:
        """Returns the `EffectiveRate` of each optimizer whose rate kdist scales."""
        return []

    def pending_variables(self) -> list[Any]:
        """Returns the variables in which ranks may differ until the next step's message."""
        return []

    def weights_are_pending(self) -> bool:
        """Returns whether a rank has loaded weights that the next step broadcasts.

        Collective: every rank must call this, in the same order.
        """
        return False

    def check_step_extension(self, who: str, *, joint: bool = False) -> None:
        """Raises where a callback cannot add to the training step.

        Args:
            who: str, the callback, for the message.
            joint: bool, whether the callback needs gradients that are summed over the ranks in each step.

        Raises:
            ScopeError: if the model trains on several devices of this process, on TPUs or on workers of parameter
                servers; with `joint`, also if it trains with local SGD.
        """
        strategy = getattr(self.model, "distribute_strategy", None)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise step_extension_error(who, self.model)

    def check_save_frequency(self, save_freq: str | int) -> None:
        """Raises `ScopeError` if a backup cannot be saved between two steps."""


def step_extension_error(who: str, model: keras.Model) -> ScopeError:
    """Returns the error of a callback that cannot add to a model's training step."""
    return ScopeError(
        f"{who} changes the training step, and needs one replica a process. Received: a model of "
        f"{type(model.distribute_strategy).__name__}. Expected a model that trains by all-reduce, or in one process on "
        f"one device. Fix: remove {who}, or start one process for each device."
    )


def session_of(model: keras.Model) -> TrainingSession:
    """Returns a model's session; that of a single process where kdist has set none."""
    found: TrainingSession | None = vars(model).get(_ATTRIBUTE)
    return TrainingSession(model) if found is None else found


def has_session(model: keras.Model) -> bool:
    """Returns whether kdist has set a session for a model."""
    return _ATTRIBUTE in vars(model)


def set_session(model: keras.Model, session: TrainingSession) -> None:
    """Sets a model's session, for the model's life."""
    vars(model)[_ATTRIBUTE] = session
