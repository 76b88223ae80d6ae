"""The callback list of a rank: the user's callbacks between kdist's; one rank writes the files of each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from kdist.checkpoint.all_ranks_callback import AllRanksCallback, BeforeUserCallbacks, has_own_train_begin
from kdist.checkpoint.backup_and_restore import BackupAndRestore
from kdist.checkpoint.callback_state import labels, run_by
from kdist.checkpoint.file_writers import decide_together, without_writing
from kdist.checkpoint.preemption import Preemption
from kdist.errors import MismatchError, StrategyError
from kdist.keras_hooks.fit.callbacks import call_in_this_thread
from kdist.keras_hooks.fit.fit_loop import callback_lists
from kdist.sharding.table import tables_of
from kdist.step.extensions import extensions_removed_at_exit
from kdist.strategies.accumulation import read_state_between_steps
from kdist.trainer.replicated_session import ReplicatedSession
from kdist.trainer.synchronization import EffectiveRateLog, RankSynchronization

ALL_RANKS_CALLBACKS: dict[str, Any] = {cls.__name__: cls for cls in (BackupAndRestore, Preemption)}


@contextlib.contextmanager
def replicated_callbacks(session: ReplicatedSession, method: str, is_outermost: bool) -> Iterator[None]:
    """Makes a method of a model use the ranks' callback lists while the context is open."""
    with contextlib.ExitStack() as undo:
        if is_outermost:
            undo.enter_context(extensions_removed_at_exit(session.model))

        def make(callbacks: Any = None, **params: Any) -> keras.callbacks.CallbackList:
            return _replicated_list(session, method, is_outermost, callbacks, params, undo)

        with callback_lists(make, session.strategy):
            yield


def _replicated_list(
    session: ReplicatedSession,
    method: str,
    is_outermost: bool,
    callbacks: Any,
    params: dict[str, Any],
    undo: contextlib.ExitStack,
) -> keras.callbacks.CallbackList:
    """Returns the callback list of a call.

    Collective: every rank must call this, in the same order.
    """
    container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    given = container.callbacks if container else keras.tree.flatten(callbacks) if callbacks is not None else []
    given = [
        BackupAndRestore.from_keras(each) if type(each) is keras.callbacks.BackupAndRestore else each
        for each in given
        if not isinstance(each, BeforeUserCallbacks)  # of a container that was made as in one process
    ]
    gathered = _GatheredCallbacks.gather(session, given)
    is_local_sgd = session.local_sgd is not None  # which reduces no gradients
    if method == "fit":
        reduces_each_step = is_local_sgd or bool(session.options.in_parts)
        session.accumulation.choose(state_is_read=gathered.read_state or not is_outermost or reduces_each_step)
    last = RankSynchronization(
        session,
        method,
        is_outermost,
        gathered.any_callbacks,
        stops_at_once=gathered.may_stop and not is_local_sgd,
        may_end_passes=gathered.may_end_passes,
    )
    first: list[Any] = [EffectiveRateLog(session)]
    if method == "fit" and gathered.have_own_train_begin:
        first.append(BeforeUserCallbacks(last.before_user_callbacks))
    users = [*first, *_run_here(session, given, gathered, undo)]
    if session.engine.rank != 0:
        params = {**params, "add_progbar": False, "verbose": 0}
    if container is None:
        made = keras.callbacks.CallbackList(users, **params)
    else:
        undo.callback(setattr, container, "callbacks", container.callbacks)
        made, made.callbacks = container, users
    # Keras would run some callbacks in a thread; messages must be sent by one thread.
    call_in_this_thread(made)
    if is_outermost:
        session.writes = gathered.writes
    internal: list[Any] = [last]
    if method == "fit":
        # After `last`: they save the state that the ranks have agreed on.
        on_all_ranks = gathered.all_ranks_callbacks(given)
        for each in on_all_ranks:
            each.set_others(made.callbacks, on_all_ranks)
            undo.callback(each.clean_up)
        last.backups = [each for each in on_all_ranks if isinstance(each, BackupAndRestore)]
        internal += on_all_ranks
    for each in [*first, *internal] if container else internal:
        each.set_params(made.params)
        each.set_model(session.model)
    made.callbacks = [*made.callbacks, *internal]
    return made


def _run_here(
    session: ReplicatedSession, given: list[Any], gathered: _GatheredCallbacks, undo: contextlib.ExitStack
) -> list[Any]:
    """Returns the user's callbacks that this rank runs: those that it writes with, and the others without writing."""
    option = session.options.in_parts
    if option:
        _refuse_swapped_averages(given, option)
        _refuse_readers(given, session)
        for label, each in zip(labels(given), given, strict=True):
            decide_together(each, session.engine, gathered.writer(label), undo)
    run = [
        each if gathered.writer(label) == session.engine.rank else without_writing(each, undo, sends_parts=bool(option))
        for label, each in zip(labels(given), given, strict=True)
        if not isinstance(each, AllRanksCallback)
    ]
    return [each for each in run if each is not None]


def _refuse_swapped_averages(callbacks: list[Any], option: str) -> None:
    if any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks):
        raise StrategyError(
            f"{option} does not support SwapEMAWeights, which reads whole averages on each rank. Received: both. "
            f"Expected one of them. Fix: use_ema=True of the optimizer alone, or kdist.AllReduce() without {option}."
        )


def _refuse_readers(callbacks: list[Any], session: ReplicatedSession) -> None:
    """Raises for callbacks that read the whole state on one rank."""
    option, kinds = session.options.in_parts, ("BackupAndRestore", "OrbaxCheckpoint")
    settings = ("histogram_freq", "embeddings_freq") if tables_of(session.model) else ("embeddings_freq",)
    for each in callbacks:
        if found := [name for name in kinds if isinstance(each, getattr(keras.callbacks, name, ()))]:
            raise StrategyError(
                f"{option} does not support a callback that saves on one rank. Received: a {type(each).__name__}, by "
                f"Keras' {found[0]}. Expected one that saves on all ranks. Fix: kdist.callbacks.BackupAndRestore, or a "
                "subclass of it."
            )
        read = [name for name in settings if getattr(each, name, 0)]
        if isinstance(each, keras.callbacks.TensorBoard) and read:
            raise StrategyError(
                f"{option} does not support TensorBoard({read[0]}=...), which reads all weights on one rank. Received: "
                f"{read[0]}={getattr(each, read[0])!r}. Expected 0. Fix: TensorBoard(..., {read[0]}=0), or "
                f"kdist.AllReduce() without {option}."
            )


@dataclasses.dataclass
class _GatheredCallbacks:
    """The callbacks that each rank was given.

    Attributes:
        rank: int, this rank.
        labels: list with the labels of each rank's callbacks.
        settings: list with each rank's settings of `AllRanksCallback`, by label.
        read_state: bool, whether a callback of any rank may read the model's state between two steps.
        may_stop: bool, whether one may stop the training there.
        may_end_passes: bool, whether one may end an evaluation or a prediction between two steps.
        have_own_train_begin: bool, whether one of the user's may look at the model when training begins.
    """

    rank: int
    labels: list[list[str]]
    settings: list[dict[str, Any]]
    read_state: bool
    may_stop: bool
    may_end_passes: bool
    have_own_train_begin: bool

    @classmethod
    def gather(cls, session: ReplicatedSession, given: list[Any]) -> _GatheredCallbacks:
        """Gathers the callbacks of all ranks; all must have the collective ones.

        Collective: every rank must call this, in the same order.
        """
        others = [each for each in given if not isinstance(each, AllRanksCallback)]
        local = [
            [label, bool(getattr(each, "is_collective", False))]
            for label, each in zip(labels(others), others, strict=True)
        ]
        settings = {label: each.settings() for label, each in _all_ranks_by_label(given).items()}
        # Keras' checkpoints look, and leave the training alone; so do kdist's callbacks.
        users = [each for each, (_, is_it) in zip(others, local, strict=True) if not is_it]
        may_stop = read_state_between_steps(each for each in users if type(each) is not keras.callbacks.ModelCheckpoint)
        may_end = read_state_between_steps(map(run_by, users), ("test_", "predict_"))
        flags = [read_state_between_steps(given), may_stop, may_end, any(map(has_own_train_begin, map(run_by, users)))]
        gathered = session.engine.gather_objects([local, settings, *flags])
        by_rank = [[label for label, _ in each[0]] for each in gathered]
        collective = {label: rank for rank, each in enumerate(gathered) for label, is_it in each[0] if is_it}
        for label, rank in collective.items():
            if missing := [other for other, each in enumerate(by_rank) if label not in each]:
                raise MismatchError(
                    f"A collective callback is not given on all ranks. Received: {label} on rank {rank}, and not on "
                    f"rank(s) {missing}. Expected it on all {len(by_rank)}. Fix: give it without a branch on the rank."
                )
        _, settings_by_rank, *by_flag = zip(*gathered, strict=True)
        return cls(session.engine.rank, by_rank, list(settings_by_rank), *map(any, by_flag))

    def writer(self, label: str) -> int:
        """Returns the first rank that was given a callback; the others run it without writing."""
        return next((rank for rank, each in enumerate(self.labels) if label in each), 0)

    @property
    def writes(self) -> bool:
        """Whether this rank saves models in callbacks: the chief, and ranks with callbacks that only they have."""
        return self.rank == 0 or any(self.writer(label) == self.rank for label in self.labels[self.rank])

    @property
    def any_callbacks(self) -> bool:
        """Whether any rank was given a callback."""
        return any(self.labels)

    def all_ranks_callbacks(self, given: list[Any]) -> list[AllRanksCallback]:
        """Returns each `AllRanksCallback` that any rank was given, backups first, with the lowest rank's settings."""
        by_label = _all_ranks_by_label(given)
        settings: dict[str, Any] = {}
        for each in self.settings:
            settings = {**each, **settings}
        for label in settings.keys() - by_label.keys():
            by_label[label] = ALL_RANKS_CALLBACKS[label.partition("#")[0]](**settings[label])
        for label, callback in by_label.items():
            callback.apply_settings(settings[label])
        return sorted((by_label[label] for label in sorted(by_label)), key=lambda each: each.position)


def _all_ranks_by_label(given: list[Any]) -> dict[str, AllRanksCallback]:
    callbacks = [each for each in given if isinstance(each, AllRanksCallback)]
    kinds = [next(name for name, cls in ALL_RANKS_CALLBACKS.items() if isinstance(each, cls)) for each in callbacks]
    return {f"{kind}#{kinds[:place].count(kind)}": callbacks[place] for place, kind in enumerate(kinds)}
