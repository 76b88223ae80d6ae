"""The callbacks that a rank runs: the user's between kdist's own, each written by one rank, whoever was given it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from kdist.errors import MismatchError
from kdist.training import _keras_internals as internals
from kdist.training.agreement import Agreement, EffectiveRateLog
from kdist.training.backup import Backup
from kdist.training.deferred_sums import look_between_steps
from kdist.training.file_writers import labels, silenced
from kdist.training.job_wide import JobWide
from kdist.training.preempt import Preempt
from kdist.training.step_wrappers import none_left_behind

if TYPE_CHECKING:
    from kdist.training.replicated_model import ReplicatedModel

JOB_WIDE: dict[str, Any] = {cls.__name__: cls for cls in (Backup, Preempt)}


@contextlib.contextmanager
def replicated_callbacks(owner: ReplicatedModel, verb: str, is_outermost: bool) -> Iterator[None]:
    """Lets a verb of a model make its callbacks the ranks' own while the context is open.

    Args:
        owner: the `ReplicatedModel`.
        verb: str, `"fit"`, `"evaluate"` or `"predict"`.
        is_outermost: bool, whether no other verb of the model is running around this one.
    """
    with contextlib.ExitStack() as undo:
        if is_outermost:
            undo.enter_context(none_left_behind(owner.model))

        def make(callbacks: Any = None, **params: Any) -> keras.callbacks.CallbackList:
            return _replicated_list(owner, verb, is_outermost, callbacks, params, undo)

        with internals.callback_lists(make, owner.strategy):
            yield


def _replicated_list(
    owner: ReplicatedModel,
    verb: str,
    is_outermost: bool,
    callbacks: Any,
    params: dict[str, Any],
    undo: contextlib.ExitStack,
) -> keras.callbacks.CallbackList:
    """Returns the list of a verb.

    Collective: every rank must call this, in the same order.
    """
    container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    given = container.callbacks if container else keras.tree.flatten(callbacks) if callbacks is not None else []
    given = [Backup.of_keras(each) if type(each) is keras.callbacks.BackupAndRestore else each for each in given]
    shared = _Shared.of(owner, given)
    if verb == "fit":
        apart = owner.averaging is not None  # then no step's gradients travel
        owner.deferred_sums.choose(looked_at=shared.look_between_steps or not is_outermost or apart)
    kept = [
        each if shared.writer(label) == owner.engine.rank else silenced(each, undo)
        for label, each in zip(labels(given), given, strict=True)
        if not isinstance(each, JobWide)
    ]
    first, last = EffectiveRateLog(owner), Agreement(owner, verb, is_outermost, shared.is_any)
    users = [first, *(each for each in kept if each is not None)]
    if owner.engine.rank != 0:  # the chief speaks
        params = {**params, "add_progbar": False, "verbose": 0}
    if container is None:
        made = keras.callbacks.CallbackList(users, **params)
    else:
        undo.callback(setattr, container, "callbacks", container.callbacks)
        made, made.callbacks = container, users
    # Keras would run some callbacks in a thread: messages must not come from two.
    made._async_train = made._async_test = made._async_predict = False
    if is_outermost:
        owner.writes = shared.writes
    kdists: list[Any] = [last]
    if verb == "fit":
        # After all others, in this order: what is saved is what has been agreed.
        own = shared.job_wide(given)
        for each in own:
            each.join(owner, made.callbacks, own)
            undo.callback(each.leave)
        last.backups = [each for each in own if isinstance(each, Backup)]
        kdists += own
    for ours in [first, *kdists] if container else kdists:
        ours.set_params(made.params)
        ours.set_model(owner.model)
    made.callbacks = [*made.callbacks, *kdists]
    return made


@dataclasses.dataclass
class _Shared:
    """Who was given which callback.

    Attributes:
        rank: int, this rank.
        labels: list, the labels of each rank's callbacks.
        settings: list, of each rank the settings of its job-wide callbacks by label.
        look_between_steps: bool, whether any rank's may look at the model between two steps.
    """

    rank: int
    labels: list[list[str]]
    settings: list[dict[str, Any]]
    look_between_steps: bool

    @classmethod
    def of(cls, owner: ReplicatedModel, given: list[Any]) -> _Shared:
        """Collective: every rank must call this, in the same order."""
        others = [each for each in given if not isinstance(each, JobWide)]
        mine = [
            [label, bool(getattr(each, "is_collective", False))]
            for label, each in zip(labels(others), others, strict=True)
        ]
        own = [each for each in given if isinstance(each, JobWide)]
        settings = {label: each.settings() for label, each in zip(cls._job_wide_labels(own), own, strict=True)}
        everyone = owner.engine.gather_objects([mine, settings, look_between_steps(given)])
        theirs = [[label for label, _ in each[0]] for each in everyone]
        for label, rank in {
            label: rank for rank, each in enumerate(everyone) for label, talks in each[0] if talks
        }.items():
            if missing := [other for other, each in enumerate(theirs) if label not in each]:
                raise MismatchError(
                    f"A callback that talks to the other ranks is not given on all. Received: {label} on rank {rank}, "
                    f"and not on rank(s) {missing}. Expected it on all {len(theirs)}. Fix: give it without a branch on "
                    "the rank."
                )
        return cls(owner.engine.rank, theirs, [each[1] for each in everyone], any(each[2] for each in everyone))

    @staticmethod
    def _job_wide_labels(own: list[JobWide]) -> list[str]:
        kinds = [next(name for name, cls in JOB_WIDE.items() if isinstance(each, cls)) for each in own]
        return [f"{kind}#{kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]

    def writer(self, label: str) -> int:
        """Returns the first rank that was given a callback; of equal ones the others are silent."""
        return next((rank for rank, theirs in enumerate(self.labels) if label in theirs), 0)

    @property
    def writes(self) -> bool:
        """Whether this rank saves what its callbacks ask the model to: the chief, and who has a callback of its own."""
        return self.rank == 0 or any(self.writer(label) == self.rank for label in self.labels[self.rank])

    @property
    def is_any(self) -> bool:
        """Whether any rank was given a callback."""
        return any(self.labels)

    def job_wide(self, given: list[Any]) -> list[JobWide]:
        """Returns the callbacks that all ranks run if one was given them: first all backups, then what uses them."""
        own = [each for each in given if isinstance(each, JobWide)]
        mine = dict(zip(self._job_wide_labels(own), own, strict=True))
        settings: dict[str, Any] = {}
        for theirs in self.settings:
            settings = {**theirs, **settings}
        found = [
            mine[label] if label in mine else JOB_WIDE[label.partition("#")[0]](**settings[label])
            for label in sorted(settings)
        ]
        for label, each in zip(sorted(settings), found, strict=True):
            each.take(settings[label])
        return found
