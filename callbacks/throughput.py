"""Samples per second, and each rank's time in input, compute and waiting."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdist.callbacks.engine_callback import EngineCallback
from kdist.callbacks.short_progress_bar import shorten_progress_bar
from kdist.data.batch import Rows, Shard, int64
from kdist.engines.engine import Engine
from kdist.keras_hooks.fit.callbacks import on_list_ready, print_msg
from kdist.keras_hooks.patching import patched
from kdist.state.session import session_of
from kdist.step.extensions import step_extensions

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "alltoall", "alltoallv", "broadcast")
THRESHOLD = 0.1  # the fraction of the time from which on a rank is called slow


class Times(NamedTuple):
    """The times of one rank.

    Attributes:
        rows: int, the samples that it has trained on.
        seconds: float, the total time.
        input: float, seconds in which steps waited for data.
        waiting: float, seconds in collectives, for other ranks or for the network.
    """

    rows: float
    seconds: float
    input: float
    waiting: float

    @property
    def compute(self) -> float:
        """The other seconds: computation and callbacks."""
        return max(0.0, self.seconds - self.input - self.waiting)

    def shares(self) -> dict[str, float]:
        """Returns the fractions of the time by name."""
        parts = {"input": self.input, "compute": self.compute, "waiting": self.waiting}
        return {name: part / self.seconds if self.seconds > 0 else 0.0 for name, part in parts.items()}


class Throughput(EngineCallback):
    """Measures samples per second over all ranks, and each rank's time in input, compute and waiting for others.

    At the end of an epoch it adds to the logs `samples_per_second`, the sum over the ranks, and for each rank `r` the
    fractions `input_rank_r`, `compute_rank_r` and `waiting_rank_r`, which sum to 1. The progress bar shows
    `samples_per_second` only. `History` has all of them, and so have `CSVLogger` and `TensorBoard`, which must come
    after this callback in the list.

    After training, unless `verbose=0`, the chief prints a table with the slow rank and the reason. `input-bound` or
    `slow compute`: the others wait for it for more than a tenth of the time. `slow link`: no rank is late, and all
    spend a third of the time in messages. Steps in which TensorFlow traces, and validation, are not measured.

    On GPUs, with an engine that does not measure its time (Horovod, TensorFlow's collective ops), pending computation
    of the device at a message is measured as waiting.

    Collective: every rank must call this, in the same order.

    Args:
        per_rank: bool, whether each rank's fractions are in the logs.
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Attributes:
        slowest: `(rank, reason)` after training; `None` if no rank is slow.
        keys_not_in_bar: frozenset of str, what it adds to the logs and not to the progress bar.

    Raises:
        ScopeError: when the model is set, if there are several ranks and no engine; when training begins, if the model
            trains on several devices of this process, or with parameter servers.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.Throughput(), keras.callbacks.CSVLogger("log.csv")])
    ```
    """

    reads_state_between_steps = False

    def __init__(self, *, per_rank: bool = True, engine: Engine | None = None) -> None:
        super().__init__(engine)
        self.per_rank = per_rank
        self.slowest: tuple[int, str] | None = None
        self.keys_not_in_bar: frozenset[str] = frozenset()
        on_list_ready(self, shorten_progress_bar)
        self._totals: list[Times] = []
        self._num_epochs = 0
        self._was_traced = False
        self._is_timing = False
        self._timed: Callable[[Any], Any] | None = None
        self._began = self._ended = 0.0
        self._waited_before: float | None = None
        self._waited_after: float | None = None
        self._input: Any = None  # made when training begins, as the other variables: a scope must come before them

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Adds the measurement to the model's step."""
        session_of(self.model).check_step_extension(type(self).__name__)
        self._totals, self._num_epochs, self.slowest = [Times(0, 0.0, 0.0, 0.0)] * self.engine.size, 0, None
        if self._input is None:
            self._make_variables()
        step_extensions(self.model).add(self, around=self._around_step)

    def _make_variables(self) -> None:
        with tf.init_scope():
            self._input = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="kdist_seconds_of_input")
            self._last = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="kdist_end_of_last_step")
            self._waiting = tf.Variable(
                0.0,
                dtype=tf.float64,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,  # of each rank, though its step writes it
                name="kdist_seconds_of_waiting",
            )
            self._rows = tf.Variable(0, dtype=tf.int64, trainable=False, name="kdist_rows")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the measurement of an epoch."""
        train_function = self.model.train_function
        if train_function is not self._timed:  # after other callbacks have replaced it
            self._timed = self.model.train_function = self._with_start_time(train_function)
        self._restart()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures the time of a step."""
        if self._was_traced:
            self._restart()
        self._ended, self._waited_after = time.perf_counter(), self.engine.seconds

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the measurements of all ranks to the logs."""
        if self._waited_before is None or self._waited_after is None:
            waiting = float(self._waiting)
        else:
            waiting = self._waited_after - self._waited_before
        local = Times(int(self._rows), self._ended - self._began, float(self._input), waiting)
        by_rank = [Times(*each) for each in self.engine.gather_objects(local)]
        seconds = max(each.seconds for each in by_rank)
        rate = sum(each.rows for each in by_rank) / seconds if seconds > 0 else float("nan")
        if logs is not None:
            logs["samples_per_second"] = rate
            by_name = {
                f"{name}_rank_{rank}": share
                for rank, each in enumerate(by_rank if self.per_rank else [])
                for name, share in each.shares().items()
            }
            logs.update(by_name)
            self.keys_not_in_bar = frozenset(by_name)
        self._totals = [Times(*np.add(a, b).tolist()) for a, b in zip(self._totals, by_rank, strict=True)]
        self._num_epochs += 1

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the measurement, and prints the table on the chief, unless `verbose=0`."""
        step_extensions(self.model).remove(self)
        self._timed = None  # it holds the model
        self.slowest = diagnose(self._totals)
        if self.engine.rank == 0 and self.params.get("verbose"):
            print_msg(table(self._totals, self._num_epochs, self.slowest))

    def _restart(self) -> None:
        self._was_traced = False
        self._input.assign(0.0)
        self._rows.assign(0)
        self._began = self._ended = time.perf_counter()
        self._waiting.assign(0.0)
        self._waited_before = self._waited_after = self.engine.seconds

    def _with_start_time(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(iterator: Any) -> Any:
            self._last.assign(tf.timestamp())  # the wait for data begins
            return train_function(iterator)

        return timed

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        self._was_traced = not tf.executing_eagerly()  # this is called in a trace, or in each eager step
        rows = data.rows if isinstance(data, Shard) else int64(Rows(data).count(data))
        arrived = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]
        with tf.control_dependencies(arrived):
            self._input.assign_add(tf.timestamp() - self._last)
            self._rows.assign_add(tf.reshape(rows, ()))
        with contextlib.ExitStack() as stack:
            for name in COLLECTIVES if self.engine.seconds is None else ():
                stack.enter_context(patched(self.engine, name, self._timing(getattr(self.engine, name))))
            logs = step(data)
        with tf.control_dependencies([leaf for leaf in keras.tree.flatten(logs) if tf.is_tensor(leaf)]):
            self._last.assign(tf.timestamp())  # for the next step of an execution
        return logs

    def _timing(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a collective of the engine with a measurement of its time, unless another one calls it."""

        def timed(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_timing:
                return collective(tensors, *args, **kwargs)
            with tf.control_dependencies(tf.nest.flatten(list(tensors), expand_composites=True)):
                began = tf.timestamp()
            self._is_timing = True
            try:
                with tf.control_dependencies([began]):
                    received = collective(tensors, *args, **kwargs)
            finally:
                self._is_timing = False
            with tf.control_dependencies(tf.nest.flatten(received, expand_composites=True)):
                self._waiting.assign_add(tf.timestamp() - began)
            return received

        return timed


def diagnose(times: Sequence[Times]) -> tuple[int, str] | None:
    """Returns the slowest rank and the reason, `None` if no rank is slow.

    Args:
        times: sequence of `Times`, one per rank.

    Example:
    >>> diagnose([Times(64, 10.0, 0.1, 4.0), Times(64, 10.0, 4.2, 0.1)])
    (1, 'input-bound')
    """
    seconds = max(each.seconds for each in times)
    if len(times) < 2 or seconds <= 0:
        return None
    slowest = min(range(len(times)), key=lambda rank: times[rank].waiting)
    others = [each for rank, each in enumerate(times) if rank != slowest]
    if statistics.median(each.waiting for each in others) - times[slowest].waiting > THRESHOLD * seconds:
        more_input = times[slowest].input - statistics.median(each.input for each in others)
        more_compute = times[slowest].compute - statistics.median(each.compute for each in others)
        return slowest, "input-bound" if more_input > more_compute else "slow compute"
    if times[slowest].waiting > seconds / 3:
        return slowest, "slow link"
    return None


def table(times: Sequence[Times], num_epochs: int, slowest: tuple[int, str] | None) -> str:
    """Returns the table of times, summed over the epochs; `slowest` is the result of `diagnose`."""
    seconds = max(each.seconds for each in times)
    rate = sum(each.rows for each in times) / seconds if seconds > 0 else float("nan")
    lines = [
        f"Throughput: {rate:.0f} samples/s over {len(times)} rank(s), {num_epochs} epoch(s)",
        "rank   input  compute  waiting",
    ]
    for rank, each in enumerate(times):
        shares = each.shares()
        why = f"  slowest: {slowest[1]}" if slowest and slowest[0] == rank else ""
        lines.append(
            f"{rank:4d}  {shares['input']:6.1%}  {shares['compute']:7.1%}  {shares['waiting']:7.1%}{why}".rstrip()
        )
    return "\n".join(lines)
