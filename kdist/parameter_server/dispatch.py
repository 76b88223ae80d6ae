"""The dispatch of functions to workers: whichever worker is free runs the next one, and results come in any order."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from kdist._tf_internals import schedule_on_any_worker
from kdist.errors import ClusterLostError
from kdist.parameter_server.failure_detector import failure_detection
from kdist.parameter_server.membership import Membership, ps_lost
from kdist.parameter_server.strategy import ParameterServerStrategy
from kdist.reports.failure import FailureHook

_POLL_INTERVAL = 0.5  # seconds after which a wait for a result checks whether it can still come
_IN_FLIGHT_PER_WORKER = 4


class PerWorkerTensors:
    """Tensors of which each worker holds a copy, sent with the first function that it runs on them.

    Args:
        tensors: sequence of tensors on the chief.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = threading.local()  # the coordinator has one thread for each worker

    def on_this_worker(self) -> list[tf.Tensor]:
        """Returns the copies of the worker whose thread this is."""
        if (copies := getattr(self._copies, "tensors", None)) is None:
            with tf.device("/device:CPU:0"):  # where Keras leaves them, too: only batches are copied to a GPU
                copies = self._copies.tensors = [tf.identity(tensor) for tensor in self._tensors]
        return list(copies)

    def forget(self) -> None:
        """Forgets the copies of the worker whose thread this is: it may have been started again."""
        self._copies.tensors = None


class Dispatcher:
    """Runs functions on whichever worker is free.

    Args:
        strategy: `ParameterServerStrategy`.
        membership: `Membership`.
        timeout: float, seconds that may pass without a result.

    Attributes:
        num_workers: int.
        max_in_flight: int, how many functions may run or wait, so that no worker is idle.
    """

    def __init__(self, strategy: ParameterServerStrategy, membership: Membership, timeout: float) -> None:
        self._strategy = strategy
        self._membership = membership
        self._timeout = timeout
        self._busy_workers: set[str] = set()
        self._progress = 0
        self._results: queue.SimpleQueue[tuple[Callable[[list[Any]], None], list[Any]]] = queue.SimpleQueue()
        self.num_workers = len(membership.workers)
        self.max_in_flight = _IN_FLIGHT_PER_WORKER * self.num_workers

    def failure_detection(self) -> AbstractContextManager[None]:
        """Returns a context that ends the job if this thread waits inside of TensorFlow for a failed task."""
        return failure_detection(self._membership, self._timeout, lambda: self._progress)

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        per_worker: PerWorkerTensors | None,
        on_result: Callable[[list[Any]], None],
    ) -> None:
        """Schedules a call of a function. If its worker is lost, another one runs it; there is one result.

        Args:
            function: concrete function of flat tensors, returning a list of tensors.
            args: sequence of tensors on the chief.
            per_worker: `PerWorkerTensors` or `None`, further arguments, which come first.
            on_result: callable that gets the outputs as arrays, called by `process_result`.
        """

        def call() -> None:
            # The coordinator has one thread for each worker, whose name ends with the worker's number.
            worker = f"worker {threading.current_thread().name.rpartition('-')[2]}"
            self._busy_workers.add(worker)
            try:
                copies = [] if per_worker is None else per_worker.on_this_worker()
                outputs = [output.numpy() for output in function(*copies, *args)]
            except tf.errors.OpError:
                if per_worker is not None:
                    per_worker.forget()
                raise
            finally:
                self._busy_workers.discard(worker)
            self._results.put((on_result, outputs))

        self._progress += 1
        try:
            schedule_on_any_worker(self._strategy.coordinator, call)
        except tf.errors.UnavailableError as error:
            raise self.explained(error) from error

    def process_result(self, *, wait: bool) -> bool:
        """Passes the result of one call that has finished to its `on_result`.

        Args:
            wait: bool, whether to wait for it.

        Returns:
            Whether there was one.

        Raises:
            ClusterLostError: if training cannot continue, or no result comes within the time limit.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                on_result, outputs = self._results.get(timeout=_POLL_INTERVAL) if wait else self._results.get_nowait()
            except queue.Empty:
                if not wait:
                    return False
                self._check(deadline)
                continue
            self._progress += 1
            on_result(outputs)
            return True

    def explained(self, error: tf.errors.UnavailableError) -> Exception:
        """Returns the error to raise for a task that TensorFlow cannot reach, which names the task where it is known.

        Args:
            error: what TensorFlow raised.
        """
        self._membership.wait_for_loss()
        try:
            self._membership.check()
        except ClusterLostError as lost:
            return lost
        return ps_lost(str(error).splitlines()[0])

    def _check(self, deadline: float) -> None:
        self._membership.check()
        try:
            self._strategy.coordinator.done()
        except tf.errors.UnavailableError as error:
            raise self.explained(error) from error
        if time.monotonic() > deadline:
            atexit.register(self._exit)
            raise ClusterLostError(
                f"The workers do not respond. Received: no result of any step for {self._timeout:.0f} s; steps in "
                f"flight: {', '.join(sorted(self._busy_workers)) or 'none'}. Expected a result. Fix: check whether a "
                "worker or ps is stopped or overloaded; or raise the limit by kdist.ParameterServer(timeout=...)."
            )

    def _exit(self) -> None:
        """Ends this process, which has reported its error: TensorFlow would wait for the failed task at exit."""
        self._membership.close(success=False)
        FailureHook(os._exit, 0, 1).end(1)
