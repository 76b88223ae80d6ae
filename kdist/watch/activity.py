"""What a rank reports in its heartbeat: the collective that it waits in, and the stack of its main thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._user_code import is_kdists, is_users, user_line
from kdist.watch.failure_detector import IN_A_GRAPH
from kdist.watch.stacks import MAX_FRAMES, Frame, stacks_of_threads

_LINE_AFTER = 1.0  # seconds without a change, after which a report has the line of the script
_STACK_AFTER = 5.0  # seconds without a change, after which a report has the stacks
_MAX_THREADS = 8
_MAX_FRAMES = 12  # of the main thread, the innermost
_BUSY_FRACTION = 0.2  # CPU time over wall-clock time between two reports, from which on a process uses the CPU
_KERAS_TRAINER = os.path.join("keras", "src", "backend", "tensorflow", "trainer.py")
_KDIST_METHODS = os.path.join("kdist", "trainer", "replicated_model.py")
_KERAS_CALLBACKS = os.path.join("keras", "src", "callbacks", "callback_list.py")


class Activity:
    """Records when collectives begin and end. It is cheap, because each collective calls it.

    Attributes:
        calls: int, how many collectives the script has begun, without those that graphs count themselves.
        graph_progress: function that returns how many collectives graphs have begun, how many they have finished, and
            a description of the current one if known; or `None`.
        group_progress: list of such functions for the graphs of groups of ranks, each with the group's ranks.
        has_finished: bool, whether the script has finished and the process waits for the others to exit.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.graph_progress: Callable[[], tuple[int, int, str]] | None = None
        self.group_progress: list[tuple[Callable[[], tuple[int, int, str]], Sequence[int]]] = []
        self.has_finished = False
        self._running: list[tuple[str, str]] = []  # those that run, with the lines that call them
        self._waiting: tuple[str, Any, int] | None = None
        self._among: Sequence[int] | None = None
        self._since = time.monotonic()
        self._graph_progress = (0, 0, "")
        self._group_progress: list[tuple[int, int, str]] = []
        self._times = (time.monotonic(), 0.0)
        self._active_at = time.monotonic()

    @contextlib.contextmanager
    def running(self, method: str) -> Iterator[None]:
        """A context that is open while a method runs that the user has called: `model.fit`, say.

        Args:
            method: str, as the user writes it.
        """
        line = user_line()
        if any(line == other for _, other in self._running):  # validation within fit
            yield
            return
        self._running.append((method, line))
        try:
            yield
        finally:
            self._running.pop()

    def begin(
        self, kind: str, sent: Sequence[tuple[Any, Any]], num_fixed: int, among: Sequence[int] | None = None
    ) -> None:
        """Records that a collective begins.

        Args:
            kind: str, `"allreduce"`, `"allgather"`, ...
            sent: sequence of pairs of a dtype and a shape, one for each tensor that is sent.
            num_fixed: int, how many of the first ones have the same shape on all ranks; the others are gathered.
            among: sequence of ints, the ranks that take part, or `None` for all. Only calls of all ranks are counted.
        """
        if (
            not self.has_finished and among is None
        ):  # the others need not make the call that a process waits in at its exit
            self.calls += 1
        self._waiting, self._among = (kind, sent, num_fixed), among
        self._since = time.monotonic()

    def end(self) -> None:
        """Records that the collective has finished."""
        self._waiting = None
        self._since = time.monotonic()

    def end_batch(self) -> None:
        """Records that a batch of a pass has ended: the rank makes progress, though it may wait for its input."""
        self._active_at = time.monotonic()

    def exclude_stopped_time(self, seconds: float) -> None:
        """Leaves out of the times of reports what passed while this process was stopped."""
        now = time.monotonic()
        self._since = min(self._since + seconds, now)
        self._active_at = min(self._active_at + seconds, now)

    def report(self) -> dict[str, Any]:
        """Returns what the heartbeat carries, as JSON values: see `RankReport`."""
        begun, finished, current = self._poll_graphs()
        call, elapsed = self._waiting, time.monotonic() - self._since
        waiting, among = None, None
        if call is not None:
            waiting, among = describe_collective(*call), self._among
        elif begun > finished:
            waiting = f"{IN_A_GRAPH}: {current}" if current else IN_A_GRAPH
        else:
            for progress, (_, ranks) in zip(self._group_progress, self.group_progress, strict=False):
                if progress[0] > progress[1]:
                    waiting, among = progress[2] or IN_A_GRAPH, ranks
        if among is not None:
            waiting = f"{waiting} among ranks {', '.join(map(str, among))}"
        stacks = stacks_of_threads() if elapsed > _LINE_AFTER else {}
        main = stacks.pop(threading.main_thread().ident or 0, [])
        stacks.pop(threading.get_ident(), None)
        is_shown = elapsed > _STACK_AFTER and bool(main)
        # A user's generator runs in a thread of TensorFlow; in some threads kdist itself waits.
        others = [stack[-1] for stack in stacks.values() if stack and not is_kdists(stack[-1].file)]
        return {
            "finished": self.has_finished,
            "calls": self.calls + begun,
            "waiting": waiting,
            "place": self._place(main),
            "among": among if among is None else list(among),
            "elapsed": elapsed,
            "idle": self._idle(),
            "in_user_code": elapsed <= _STACK_AFTER or _in_user_code(main, in_method=bool(self._running)),
            "stack": list(map(str, _relevant(main)[-_MAX_FRAMES:])) if is_shown else [],
            "threads": list(map(str, others[:_MAX_THREADS])) if is_shown else [],
        }

    def _place(self, stack: Sequence[Frame]) -> str:
        """Returns the method that runs and its line; without one the line of the script, if the stack is known."""
        if self.has_finished:
            return ""
        if methods := self._running[-1:]:
            method, line = methods[0]
            return f"`{method}`, {line}"
        users = [frame for frame in stack if is_users(frame.file)]
        return f"{os.path.basename(users[-1].file)}:{users[-1].line}" if users else ""

    def _poll_graphs(self) -> tuple[int, int, str]:
        """Returns what `graph_progress` does, and records the time when that changes."""
        if self.graph_progress is None or self.has_finished:  # TensorFlow may be shutting down by then
            return self._graph_progress
        progress, groups = self.graph_progress(), [poll() for poll, _ in self.group_progress]
        if (progress, groups) != (self._graph_progress, self._group_progress):
            self._graph_progress, self._group_progress, self._since = progress, groups, time.monotonic()
        return progress

    def _idle(self) -> float:
        """Returns for how long this process, all its threads, has not used the CPU, and has ended no batch."""
        before, now = self._times, (time.monotonic(), time.process_time())
        self._times = now
        if now[1] - before[1] > _BUSY_FRACTION * (now[0] - before[0]):
            self._active_at = now[0]
        return now[0] - self._active_at


def describe_collective(kind: str, arrays: Sequence[tuple[Any, Any]], num_fixed: int) -> str:
    """Returns a collective as text, which is equal on all ranks that make the same call.

    Args:
        kind: str.
        arrays: sequence of dtypes and shapes.
        num_fixed: int, how many of the first ones have the same shape on all ranks; the others may differ in rows.
    """
    shapes = [shape if place < num_fixed else ("any", *shape[1:]) for place, (_, shape) in enumerate(arrays)]
    sent = [f"{dtype}[{', '.join(map(str, shape))}]" for (dtype, _), shape in zip(arrays, shapes, strict=True)]
    if not sent:
        return kind
    shown = sent if len(sent) <= 6 else [*sent[:3], f"({len(sent) - 6} more)", *sent[-3:]]
    return f"{kind} of {len(sent)} tensor(s) {' '.join(shown)}".strip()


def _relevant(stack: Sequence[Frame]) -> list[Frame]:
    """Returns the frames of the user's files, those of Keras' `fit` and the like, and the innermost one."""
    kept = [frame for frame in stack[:-1] if frame.file.endswith(_KERAS_TRAINER) or is_users(frame.file)]
    return [*kept, *stack[-1:]]


def _in_user_code(stack: Sequence[Frame], *, in_method: bool) -> bool:
    """Returns whether the user's code runs outside of `fit` and the like, or in a callback, where it may take long.

    In a callback a model of no scope may have a loop of its own, which is the user's code, too.
    Where a call runs, and frames that may be Keras' were not read, that is not known: then the rank counts as stuck if
    it is idle.
    """
    methods, trainer = (
        [place for place, frame in enumerate(stack) if frame.file.endswith(file)]
        for file in (_KDIST_METHODS, _KERAS_TRAINER)
    )
    begin = (methods or trainer or [0])[-1]
    if any(frame.file.endswith(_KERAS_CALLBACKS) for frame in stack[begin:]):
        return True
    is_whole = 0 < len(stack) < MAX_FRAMES
    return not trainer and (is_whole or not in_method)
