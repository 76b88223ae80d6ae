"""Handing steps out to the workers, and waiting for them: any of them may answer first, and none for ever."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.errors import ClusterLostError
from kdist.launch.failure import FailureHook
from kdist.strategies.attendance import Attendance, ps_lost
from kdist.strategies.parameter_server import ParameterServerStrategy
from kdist.strategies.silence import silence_ends_the_job

_LOOK = 0.5  # seconds after which who waits looks whether there is still somebody to wait for

Take = Callable[[list[Any]], None]


class Resident:
    """Tensors that each worker is sent once, with the first step that needs them.

    Args:
        tensors: sequence of tensors on the chief.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._tensors = list(tensors)
        self._of_worker = threading.local()  # the coordinator has one thread for each worker

    def on_this_worker(self) -> list[tf.Tensor]:
        """Returns the copies of the worker whose thread this is."""
        if not hasattr(self._of_worker, "copies"):
            with tf.device("/device:CPU:0"):  # where Keras leaves them, too: batches are what a GPU gets
                self._of_worker.copies = [tf.identity(tensor) for tensor in self._tensors]
        return list(self._of_worker.copies)

    def forget(self) -> None:
        """Forgets the copies of the worker whose thread this is: it may have been started anew."""
        self._of_worker.__dict__.clear()


class Dispatcher:
    """Runs functions on whichever worker is free.

    Args:
        strategy: `ParameterServerStrategy`.
        attendance: `Attendance`, who is there.
        timeout: float, seconds that may pass without any answer.
    """

    def __init__(self, strategy: ParameterServerStrategy, attendance: Attendance, timeout: float) -> None:
        self._strategy = strategy
        self._attendance = attendance
        self._timeout = timeout
        self._at_work: set[str] = set()
        self._progress = 0
        self._finished: queue.SimpleQueue[tuple[Take, list[Any]]] = queue.SimpleQueue()
        self.num_workers = len(attendance.workers)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sees to it that the job ends where this thread waits for a task inside of TensorFlow, for ever."""
        with silence_ends_the_job(self._attendance, self._timeout, lambda: self._progress):
            yield

    def submit(self, function: Callable[..., Any], args: Sequence[Any], resident: Resident | None, take: Take) -> None:
        """Schedules a call.

        If its worker is lost, another one makes it; its outputs are taken once.

        Args:
            function: concrete function of flat tensors, returning a list of tensors.
            args: sequence of tensors on the chief.
            resident: `Resident` or `None`, further arguments, that come first.
            take: callable that gets the outputs as arrays, called by `take_one`.
        """

        def call() -> None:
            # The coordinator has one thread for each worker, whose name ends with the worker's number.
            worker = f"worker {threading.current_thread().name.rpartition('-')[2]}"
            self._at_work.add(worker)
            try:
                kept = [] if resident is None else resident.on_this_worker()
                outputs = [output.numpy() for output in function(*kept, *args)]
            except tf.errors.OpError:
                if resident is not None:
                    resident.forget()
                raise
            finally:
                self._at_work.discard(worker)
            self._finished.put((take, outputs))

        self._progress += 1
        try:
            # Not the coordinator's own `schedule`: it takes no Python, and so its results come back in one order only.
            self._strategy.coordinator._cluster.schedule(call, (), {})
        except tf.errors.UnavailableError as error:
            raise self.explained(error) from error

    def take_one(self, *, wait: bool) -> bool:
        """Hands the outputs of one call that has finished to who scheduled it.

        Args:
            wait: bool, whether to wait for it.

        Returns:
            Whether there was one.

        Raises:
            ClusterLostError: if training cannot go on, or nothing is heard of any worker within the time limit.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                take, outputs = self._finished.get(timeout=_LOOK) if wait else self._finished.get_nowait()
            except queue.Empty:
                if not wait:
                    return False
                self._look(deadline)
                continue
            self._progress += 1
            take(outputs)
            return True

    def explained(self, error: tf.errors.UnavailableError) -> Exception:
        """Returns the error to raise for a task that TensorFlow does not reach: who is lost, if that is known.

        Args:
            error: what TensorFlow raised.
        """
        self._attendance.wait_for_news()
        try:
            self._attendance.check()
        except ClusterLostError as lost:
            return lost
        return ps_lost(str(error).splitlines()[0])

    def _look(self, deadline: float) -> None:
        self._attendance.check()
        try:
            self._strategy.coordinator.done()
        except tf.errors.UnavailableError as error:
            raise self.explained(error) from error
        if time.monotonic() > deadline:
            atexit.register(self._leave)
            asked = ", ".join(sorted(self._at_work)) or "no worker"
            raise ClusterLostError(
                f"The workers do not answer. Received: no result of any step for {self._timeout:.0f} s; {asked} has "
                "one to make. Expected one. Fix: see whether it, or a ps, is stopped or overloaded; give it longer by "
                "kdist.ParameterServer(timeout=...)."
            )

    def _leave(self) -> None:
        """Ends this process, which has said why: on its way out TensorFlow would wait for who does not answer."""
        self._attendance.dismiss(well=False)
        FailureHook(os._exit, 0, 1).end(1)
