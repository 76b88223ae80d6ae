"""The functions that workers run for a model, each traced once on the chief for a kind of input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.parameter_server.feed import Feed
from kdist.parameter_server.step import Layout, WorkerStep
from kdist.parameter_server.strategy import ParameterServerStrategy
from kdist.strategies.options import ParameterServer

Function = Callable[..., list[tf.Tensor]]  # of a worker's copies of arrays, then of the tensors that are sent


class WorkerFunctions:
    """The functions of one model.

    Args:
        model: `keras.Model`.
        strategy: `ParameterServerStrategy`.
        options: `ParameterServer`.

    Attributes:
        model: `keras.Model`.
        traced: dictionary of what was traced, by kind (`"train"`, ...), number of batches and kind of input.
    """

    def __init__(self, model: keras.Model, strategy: ParameterServerStrategy, options: ParameterServer) -> None:
        self.model = model
        self._strategy = strategy
        self._options = options
        self.traced: dict[tuple[str, int, str], tuple[Function, Any]] = {}

    def forget(self, kind: str) -> None:
        """Forgets the functions of a kind, which are traced again."""
        self.traced = {key: value for key, value in self.traced.items() if key[0] != kind}

    def steps(self, kind: str, feed: Feed, num_batches: int, starts: Sequence[np.ndarray]) -> tuple[Function, Layout]:
        """Returns the function that makes some training or test steps, and the layout of the vector that it returns.

        Args:
            kind: str, `"train"` or `"test"`.
            feed: `Feed` of the batches.
            num_batches: int, how many steps.
            starts: sequence of arrays, the states of the model's metrics when they are reset.
        """
        key = (kind, num_batches, feed.kind)
        if key not in self.traced:
            step = WorkerStep(self.model, kind, self._strategy, self._options, starts)
            function = self._concrete(feed, num_batches, lambda batches: [step.vector(batches)])
            self.traced[key] = function, step.layout
        return self.traced[key]

    def prediction(self, feed: Feed) -> tuple[Function, Any]:
        """Returns the function that predicts a batch, and the structure of the model's outputs."""
        key = ("predict", 1, feed.kind)
        if key not in self.traced:
            structures = []

            def predict(batches: list[Any]) -> list[tf.Tensor]:
                outputs = self._strategy.run(self.model.predict_step, args=(batches[0],))
                structures.append(outputs)
                return tf.nest.flatten(outputs, expand_composites=True)

            self.traced[key] = self._concrete(feed, 1, predict), structures[-1]
        return self.traced[key]

    def _concrete(self, feed: Feed, num_batches: int, run: Callable[[list[Any]], list[tf.Tensor]]) -> Function:
        num_copies, width = len(feed.per_worker_specs), len(feed.specs)

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            copies, sent = list(tensors[:num_copies]), tensors[num_copies:]
            return run([feed.batch(copies, sent[i * width : (i + 1) * width]) for i in range(num_batches)])

        specs = [*feed.per_worker_specs, *(feed.specs * num_batches)]
        with self._strategy.scope(), self._strategy.extended.tracing():
            return tf.function(function, autograph=False).get_concrete_function(*specs)
