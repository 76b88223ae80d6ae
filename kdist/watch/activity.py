"""What this rank is doing: the collective that it waits in, and where its main thread is."""

from __future__ import annotations

import os
import site
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from kdist.watch.verdict import IN_A_GRAPH

_STACK_AFTER = 5.0  # seconds without a collective, after which a report says where the main thread is
_MOST_THREADS = 8  # that are told
_MOST_FRAMES = 12  # of the main thread's, the innermost
_BUSY = 0.2  # of the time between two reports on the processor
_LIBRARIES = tuple({*site.getsitepackages(), os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)})
_KERAS_VERBS = os.path.join("keras", "src", "backend", "tensorflow", "trainer.py")
_KERAS_CALLBACKS = os.path.join("keras", "src", "callbacks", "callback_list.py")


class Activity:
    """Notes when collectives begin and end; cheap, for it is done at each.

    Attributes:
        calls: int, how many collectives the script has begun, without those of graphs that count theirs.
        of_graphs: function that returns how many collectives graphs have begun and ended, and what is under way if it
            knows; or `None`.
        has_ended: bool, whether the script is through and the process only waits for the others.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.of_graphs: Callable[[], tuple[int, int, str]] | None = None
        self.has_ended = False
        self._waiting: tuple[str, Any, int] | None = None
        self._since = time.monotonic()
        self._of_graphs = (0, 0, "")
        self._processor = (time.monotonic(), 0.0)

    def begin(self, kind: str, sent: Sequence[tuple[Any, Any]], num_fixed: int) -> None:
        """Notes that a collective begins.

        Args:
            kind: str, `"allreduce"`, `"allgather"`, ...
            sent: sequence of pairs of a dtype and a shape, one for each tensor that is sent.
            num_fixed: int, how many of them, the first ones, have the same shape on all ranks; the others are gathered.
        """
        if not self.has_ended:  # in what a process waits at its exit is no call that the others make
            self.calls += 1
        self._waiting = (kind, sent, num_fixed)
        self._since = time.monotonic()

    def end(self) -> None:
        """Notes that the collective has ended."""
        self._waiting = None
        self._since = time.monotonic()

    def report(self) -> dict[str, Any]:
        """Returns what the other ranks are told, as JSON values: see `verdict.Sign`."""
        begun, done, what = self._look_at_graphs()
        called, since = self._waiting, time.monotonic() - self._since
        waiting = None
        if called is not None:
            waiting = described(*called)
        elif begun > done:
            waiting = f"{IN_A_GRAPH}: {what}" if what else IN_A_GRAPH
        stack = _main_stack() if since > _STACK_AFTER else []
        threads = _other_threads() if stack else []
        return {
            "ended": self.has_ended,
            "calls": self.calls + begun,
            "waiting": waiting,
            "since": since,
            "busy": self._uses_processor(),
            "own_code": _in_own_code(stack),
            "stack": [_place(frame, line) for frame, line in _of_interest(stack)[-_MOST_FRAMES:]],
            "threads": [_place(frame, frame.f_lineno) for frame in threads[:_MOST_THREADS]],
        }

    def _look_at_graphs(self) -> tuple[int, int, str]:
        """Returns what `of_graphs` does; notes when that has changed."""
        if self.of_graphs is None or self.has_ended:  # TensorFlow may be on its way out by then
            return self._of_graphs
        found = self.of_graphs()
        if found != self._of_graphs:
            self._of_graphs, self._since = found, time.monotonic()
        return found

    def _uses_processor(self) -> bool:
        """Returns whether this process, all its threads, has computed since the last report."""
        before, now = self._processor, (time.monotonic(), time.process_time())
        self._processor = now
        return now[1] - before[1] > _BUSY * (now[0] - before[0])


def described(kind: str, arrays: Sequence[tuple[Any, Any]], num_fixed: int) -> str:
    """Returns a collective as text: equal on all ranks that make the same call.

    Args:
        kind: str.
        arrays: sequence of dtypes and shapes.
        num_fixed: int, after how many of them the first dimensions may differ between the ranks, and are left out.
    """
    shapes = [shape if place < num_fixed else ("any", *shape[1:]) for place, (_, shape) in enumerate(arrays)]
    sent = [f"{dtype}[{', '.join(map(str, shape))}]" for (dtype, _), shape in zip(arrays, shapes, strict=True)]
    if not sent:
        return kind
    shown = sent if len(sent) <= 6 else [*sent[:3], f"({len(sent) - 6} more)", *sent[-3:]]
    return f"{kind} of {len(sent)} tensor(s) {' '.join(shown)}".strip()


def _main_stack() -> list[tuple[FrameType, int]]:
    """Returns the main thread's frames with their line numbers, the outermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def _other_threads() -> list[FrameType]:
    """Returns where the other Python threads are: a generator of the user's runs in one of TensorFlow's."""
    known = {threading.main_thread().ident, threading.get_ident()}
    return [frame for ident, frame in sys._current_frames().items() if ident not in known]


def _of_interest(stack: list[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """Returns the frames of the user's own files, Keras' verbs, and the innermost one."""
    return [
        (frame, line)
        for place, (frame, line) in enumerate(stack)
        if place == len(stack) - 1
        or frame.f_code.co_filename.endswith(_KERAS_VERBS)
        or not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
    ]


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _in_own_code(stack: list[tuple[FrameType, int]]) -> bool:
    """Returns whether the user's own code runs: between Keras' verbs, or in a callback, where it may take its time."""
    files = [frame.f_code.co_filename for frame, _ in stack]
    verbs = [place for place, name in enumerate(files) if name.endswith(_KERAS_VERBS)]
    return not verbs or any(name.endswith(_KERAS_CALLBACKS) for name in files[verbs[-1] :])
