"""Keras' epoch iterator over a rank's shards, and the position in its data, converted to other numbers of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.data.make_source import batch_to_build_on
from kdist.data.py_dataset import PyDatasetSource
from kdist.data.source import Source, empty_input_error
from kdist.keras_hooks.fit.fit_loop import PassIterator
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import runs_eagerly
from kdist.trainer.feeding.source_adapter import SourceAdapter


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in the data of `fit`, between two steps.

    Attributes:
        kind: str, the class of the source.
        seed: int, the seed of the source's orders.
        group_size: int, the user's batches in one step.
        batch_size: int or `None`, the rows of the user's batch, if given as an argument.
        extent: int or `None`, the samples (arrays) or batches of the user's input.
        steps_per_epoch: int or `None`, the user's batches in an epoch, if given.
        num_steps: int or `None`, the steps of a pass over the data, if known.
        source_epoch: int, the epochs that the source began before the current one; -1 before the first.
        num_passes: int, the passes over the data that began before the current one.
        pass_epoch: int, the `source_epoch` in which the current pass began.
        pass_step: int, the steps that the current pass has made.
        epoch_step: int, the steps that the current epoch has made; 0 between epochs.
    """

    kind: str
    seed: int
    group_size: int
    batch_size: int | None
    extent: int | None
    steps_per_epoch: int | None
    num_steps: int | None
    source_epoch: int
    num_passes: int
    pass_epoch: int
    pass_step: int
    epoch_step: int

    def in_source(self, source: Source) -> Position:
        """Returns the same position in a source whose steps have another number of the user's batches.

        If no step begins there, the previous step is repeated, so that no sample is left out.
        """
        plan = source.plan
        now = dataclasses.replace(
            self,
            group_size=plan.group_size,
            batch_size=source.batch_size,
            extent=source.cardinality,
            steps_per_epoch=plan.steps_per_epoch,
            num_steps=source.num_steps,
        )
        same = ("group_size", "batch_size", "extent", "steps_per_epoch")
        if all(getattr(now, name) == getattr(self, name) for name in same):
            # A pass over data of unknown length has told it; with other steps, it has to tell it again.
            return now if now.num_steps is not None else dataclasses.replace(now, num_steps=self.num_steps)
        if self.steps_per_epoch is None or plan.steps_per_epoch is None:
            step = _converted(self, now, self.pass_step)
            return dataclasses.replace(now, pass_step=step, epoch_step=step if self.epoch_step else 0)
        before = -(-self.steps_per_epoch // self.group_size)
        after = -(-plan.steps_per_epoch // plan.group_size)
        whole = (self.pass_step - self.epoch_step) // before
        epoch_step = min(_converted(self, now, self.epoch_step), after - 1)
        return dataclasses.replace(now, pass_step=whole * after + epoch_step, epoch_step=epoch_step)


def _converted(before: Position, now: Position, step: int) -> int:
    rows = step * before.group_size * (before.batch_size or 1)
    return rows // (now.group_size * (now.batch_size or 1))


class _LazyIterator:
    """An iterator that is made with its first element: Keras makes an unused one in each epoch."""

    def __init__(self, dataset: tf.data.Dataset, *, eager: bool) -> None:
        self._dataset = dataset
        if eager:
            _ = self.elements

    def __iter__(self) -> _LazyIterator:
        return self

    def __next__(self) -> Any:
        return next(self.elements)

    @functools.cached_property
    def elements(self) -> Iterator[Any]:
        """The iterator of the dataset."""
        return iter(self._dataset)


class ShardedEpochIterator(PassIterator):
    """Iterates over a rank's shards, and calls functions when a pass over them begins and ends.

    Args:
        adapter: `SourceAdapter`, the data.
        model: `keras.Model`.
        is_chief: bool, whether this rank shows Keras' warnings.
        remake: callable that takes a seed and makes the source again.
        **options: the other arguments of `PassIterator`.

    Attributes:
        ended_within_a_graph: bool, whether the graph of a step has found the end of the data in the last epoch.
    """

    def __init__(
        self,
        adapter: SourceAdapter,
        *,
        model: keras.Model,
        is_chief: bool,
        remake: Callable[[int], Source],
        **options: Any,
    ) -> None:
        super().__init__(adapter, **options)
        self._model = model
        self._is_chief = is_chief
        self._remake = remake
        self._is_first_pass = True
        self._ends_within_graphs = model.steps_per_execution == 1 and not runs_eagerly(model)
        self.ended_within_a_graph = False
        # See `Position`.
        self._source_epoch = -1
        self._pass_epoch = -1
        self._num_passes = 0
        self._resumed: Position | None = None

    def reset(self) -> None:
        """Resets the iterator, unless the data can be read only once.

        Keras would drop the prefetched batches, of which each rank has another number.
        """
        iterator = self.iterator if self.data_adapter.source.is_single_pass else None
        super().reset()
        self.iterator = iterator

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the pass; see `PassIterator.catch_stop_iteration`.

        Raises:
            DataError: on all ranks, if the first step found no data.
        """
        with super().catch_stop_iteration(), patched(self._model, "steps_per_execution", self.steps_per_execution):
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                self.ended_within_a_graph = self._ends_within_graphs
                # With several steps per execution, some may have run before the data ended.
                if self._is_first_pass and self.steps_seen == self.steps_per_execution == 1:
                    raise empty_input_error("dataset") from None
                raise
            finally:
                self._is_first_pass = False

    def position(self, epoch_step: int) -> Position:
        """Returns the position in the data."""
        source = self.data_adapter.source
        keeps_iterator = self.steps_per_epoch is not None
        return Position(
            kind=type(source).__name__,
            seed=source.plan.seed,
            group_size=source.plan.group_size,
            batch_size=source.batch_size,
            extent=source.cardinality,
            steps_per_epoch=source.plan.steps_per_epoch,
            num_steps=self.steps_of_pass,
            source_epoch=self._source_epoch,
            num_passes=self._num_passes,
            pass_epoch=self._pass_epoch,
            pass_step=self.steps_seen if keeps_iterator else epoch_step,
            epoch_step=epoch_step,
        )

    def is_last(self, epoch_step: int) -> bool:
        """Returns whether `epoch_step` is known to be the last of the epoch."""
        num_steps = self.steps_per_epoch or self.steps_of_pass
        is_pass_over = self.steps_of_pass is not None and self.steps_seen >= self.steps_of_pass
        return is_pass_over or (num_steps is not None and epoch_step >= num_steps)

    def resume(self, position: Position) -> Position:
        """Goes to a position of any number of ranks, before the first pass, and returns the one in this data."""
        source = self.data_adapter.source
        is_remade = not source.draws_in_background or isinstance(source, PyDatasetSource)
        if position.seed != source.plan.seed and is_remade:
            source = self.data_adapter.source = self._remake(position.seed)
            self.dataset = self.data_adapter.get_tf_dataset()
        position = position.in_source(source)
        ragged = position.epoch_step % self.steps_per_execution
        position = dataclasses.replace(
            position, epoch_step=position.epoch_step - ragged, pass_step=position.pass_step - ragged
        )
        is_within = position.epoch_step > 0
        self._source_epoch = position.source_epoch - is_within
        self._pass_epoch = position.pass_epoch
        self._is_first_pass = False
        if self.steps_of_pass is None and not self.steps_per_epoch:
            self.steps_of_pass = position.num_steps
        source.resume(self._source_epoch, position.pass_epoch if position.pass_step else None, position.pass_step)
        begins_later = not is_within and self.steps_per_epoch is None
        for _ in range(position.num_passes - (not begins_later) if source.reshuffles_each_iteration else 0):
            iter(self.dataset)
        self._num_passes = position.num_passes - (not begins_later)
        self._resumed = position
        if not begins_later and self.steps_per_epoch is not None:
            self.begin_at(position.pass_step - position.epoch_step)
        return position

    def make_iterator(self) -> _LazyIterator:
        """Returns the next pass over the dataset."""
        self._num_passes += 1
        resumed, dataset = self._resumed, self.dataset
        if resumed is not None and resumed.pass_step:
            dataset = dataset.skip(resumed.pass_step)
        return _LazyIterator(dataset, eager=self.data_adapter.source.reshuffles_each_iteration)

    def steps(self) -> Iterator[Any]:
        """Yields the steps of an epoch, without those that a resumed epoch has made."""
        self._source_epoch += 1
        self.ended_within_a_graph = False
        made = self._resumed.epoch_step if self._resumed else 0
        for begin, end, iterator in super().steps():
            self._resumed = None  # a second iterator starts at the beginning
            if begin < made:
                continue
            if self.steps_seen == self.steps_per_execution:
                self._pass_epoch = self._source_epoch
            yield begin, end, iterator.elements

    def warn_of_the_end(self) -> None:
        """Warns on the chief."""
        if self._is_chief:
            super().warn_of_the_end()

    def batch_to_build_on(self, model: keras.Model) -> Any:
        """Returns a batch to build a model, without taking one from the epoch; `None` if the model is built."""
        batch = batch_to_build_on(self.data_adapter.source, model)
        return self.data_adapter.source.example() if batch is not None and runs_eagerly(model) else batch
