"""Predictions that workers make, in the order of the batches."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.parameter_server.dispatch import Dispatcher
from kdist.parameter_server.feed import WorkerBatch
from kdist.parameter_server.functions import WorkerFunctions


class PredictionFuture:
    """The prediction of one batch, in flight or finished.

    Args:
        dispatcher: `Dispatcher`.
        functions: `WorkerFunctions` of the model.
        batch: `WorkerBatch`.
    """

    def __init__(self, dispatcher: Dispatcher, functions: WorkerFunctions, batch: WorkerBatch) -> None:
        function, self._structure = functions.prediction(batch.feed)
        self._dispatcher = dispatcher
        self._outputs: list[np.ndarray] | None = None
        dispatcher.submit(function, batch.tensors, batch.feed.per_worker, self._set_outputs)

    def _set_outputs(self, outputs: list[np.ndarray]) -> None:
        self._outputs = outputs

    def result(self) -> Any:
        """Returns the model's outputs in their structure, when they are there."""
        while self._outputs is None:
            self._dispatcher.process_result(wait=True)
        tensors = [tf.constant(each) for each in self._outputs]
        return tf.nest.pack_sequence_as(self._structure, tensors, expand_composites=True)


def predictions(
    dispatcher: Dispatcher, functions: WorkerFunctions, batches: Iterator[WorkerBatch]
) -> Iterator[PredictionFuture]:
    """Yields the predictions of batches, with others in flight ahead of it."""
    in_flight: collections.deque[PredictionFuture] = collections.deque()
    for batch in batches:
        in_flight.append(PredictionFuture(dispatcher, functions, batch))
        if len(in_flight) == dispatcher.max_in_flight:
            yield in_flight.popleft()
    yield from in_flight
