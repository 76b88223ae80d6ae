"""Updates of parts of weights, a few at a time: others take no memory then."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.arrays.buckets import assign_buckets
from kdist.keras_hooks.optimizers import DECAY, UPDATE
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import raw_variable
from kdist.sharding.part import Part
from kdist.strategies.update_chain import UpdateChain

AHEAD = 2
"""Updates wait for the group so many before: while weights of one are gathered, parts of the next are updated."""


class PartUpdates(UpdateChain):
    """Loads parts of a group of weights, updates and gathers them, and frees them, in a graph group after group.

    Args:
        parts: sequence of `Part`, in the order in which Keras updates them.
        gather: callable that sets the weights of some parts, frees these, and returns the operations that do so.
        bucket_mb: float, the megabytes of weights from which on a group is full.
    """

    def __init__(self, parts: Sequence[Part], gather: Callable[[Sequence[Part]], list[Any]], bucket_mb: float) -> None:
        super().__init__()
        self._gather = gather
        self._parts = {id(raw_variable(part.variable)): part for part in parts}
        self._lasts: dict[int, list[Part]] = {}  # each group by the part that is updated last
        for places in assign_buckets([part.num_bytes for part in parts], bucket_mb) if parts else []:
            self._lasts[id(parts[places[0]])] = [parts[place] for place in places]
        self._decays: dict[int, Callable[[], Any]] = {}  # by the parts' variables
        self._graph: tf.Graph | None = None
        self._gathered: list[list[Any]] = []  # in this graph

    @contextlib.contextmanager
    def decaying_in_turn(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Lets the decay of each weight come just before its update; Keras decays all before the first update.

        Args:
            optimizer: `keras.optimizers.Optimizer`, an innermost one.
        """
        decay = getattr(optimizer, DECAY)

        def decay_later(variables: Sequence[Any]) -> None:
            for variable in variables:
                key = id(raw_variable(variable))
                if key in self._parts:
                    self._decays[key] = functools.partial(decay, [variable])
                else:
                    decay([variable])

        with patched(optimizer, DECAY, decay_later):
            yield

    def run(self, update: Callable[..., Any], variable: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See `UpdateChain.run`."""
        part = self._parts.get(id(variable))
        if part is None:
            return super().run(update, variable, *args, **kwargs)
        if getattr(update, "__name__", "") != UPDATE:  # of a loaded part
            return update(variable, *args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._gathered = graph, []
        with tf.control_dependencies(self._gathered[-AHEAD] if len(self._gathered) >= AHEAD else []):
            part.load()
            self._decays.pop(id(variable), _nothing)()
            result = update(variable, *args, **kwargs)
        if id(part) in self._lasts:
            self._gathered.append(self._gather(self._lasts[id(part)]))
        return result


def _nothing() -> None:
    pass
