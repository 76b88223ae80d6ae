"""Predictions that workers make, asked for ahead of time."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kdist.strategies.dispatch import Dispatcher
from kdist.training.scheduled_data import Batches
from kdist.training.scheduled_pass import IN_FLIGHT

if TYPE_CHECKING:
    from kdist.training.scheduled_model import ScheduledModel


class Ticket:
    """A prediction that was asked for.

    Args:
        dispatcher: `Dispatcher`.
        structure: structure of symbolic tensors, what the model puts out.
    """

    def __init__(self, dispatcher: Dispatcher, structure: Any) -> None:
        self._dispatcher = dispatcher
        self._structure = structure
        self._outputs: list[np.ndarray] | None = None

    def take(self, outputs: list[np.ndarray]) -> None:
        """Is given the outputs."""
        self._outputs = outputs

    def wait(self) -> Any:
        """Returns the outputs, in the model's structure, when they are there."""
        while self._outputs is None:
            self._dispatcher.take_one(wait=True)
        return tf.nest.pack_sequence_as(
            self._structure, [tf.constant(each) for each in self._outputs], expand_composites=True
        )


class Predictions:
    """Predictions in the order of the batches, asked for ahead of time.

    Args:
        owner: `ScheduledModel`.
        batches: `Batches`.
    """

    def __init__(self, owner: ScheduledModel, batches: Batches) -> None:
        self._owner = owner
        self._batches = batches
        self._asked: collections.deque[Ticket] = collections.deque()

    def __iter__(self) -> Iterator[Ticket]:
        return self

    def __next__(self) -> Ticket:
        ahead = IN_FLIGHT * self._owner.dispatcher.num_workers
        with contextlib.suppress(StopIteration):
            while len(self._asked) < ahead:
                self._asked.append(self._owner.predict(self._batches.feed, next(self._batches)))
        if not self._asked:
            raise StopIteration
        return self._asked.popleft()
