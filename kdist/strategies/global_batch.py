"""The global batch on every rank: targets, predictions and weights of all ranks, for losses and metrics of all rows."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.losses import get_keras_mask, set_keras_mask
from kdist.strategies.differentiable import ReplicaStep, rows_of_all_ranks, sum_over_ranks

logger = logging.getLogger("kdist")

LARGE_ROW = 2**20  # bytes


class GlobalBatch:
    """Gathers the rows of a step, each tensor once, in the order of the global batch.

    What is computed from them must be computed alike on all ranks: then the gradient of this rank's rows needs no
    message.

    Args:
        engine: `Engine`, how the ranks communicate.
        step: `ReplicaStep`, the open step.
    """

    def __init__(self, engine: Engine, step: ReplicaStep) -> None:
        self._engine = engine
        self._step = step
        self._gathered: dict[tuple[int, int], tuple[Any, Any]] = {}  # with the tensor, whose id is the key

    def gather(self, values: Any) -> Any:
        """Returns a structure with the rows of all ranks in the place of this rank's, and Keras' masks with them.

        Of scalar tensors it returns the mean, weighted by the ranks' rows, and of integers the sum. What is no tensor
        stays as it is.

        Collective: every rank must call this, in the same order.
        """
        if self._engine.size == 1:  # with local SGD
            return values
        leaves = [tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x for x in keras.tree.flatten(values)]
        new = {self._key(x): x for x in leaves if _is_batch(x) and self._key(x) not in self._gathered}
        if new:
            self._gather_rows(list(new.values()))
        return keras.tree.pack_sequence_as(values, [self._of_all_ranks(leaf) for leaf in leaves])

    def _of_all_ranks(self, leaf: Any) -> Any:
        if _is_batch(leaf):
            return self._gathered[self._key(leaf)][1]
        if not tf.is_tensor(leaf) or leaf.shape.rank != 0:
            return leaf
        if leaf.dtype.is_floating or leaf.dtype.is_complex:
            leaf = leaf * tf.cast(self._step.weight, leaf.dtype)
        return sum_over_ranks(self._engine, self._step, [leaf])[0]

    def _key(self, leaf: Any) -> tuple[int, int]:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return id(leaf), id(graph)

    def _gather_rows(self, leaves: list[Any]) -> None:
        masks = [get_keras_mask(leaf) for leaf in leaves]
        parts = [*map(_components, leaves), *([mask] for mask in masks if mask is not None)]
        self._warn_of_large_rows(leaves)
        local = self._equally_wide([each for part in parts for each in part])
        rows = iter(rows_of_all_ranks(self._engine, self._step, local, alike=True))
        gathered = [_composed(leaf, [next(rows) for _ in _components(leaf)]) for leaf in leaves]
        for leaf, mask, result in zip(leaves, masks, gathered, strict=True):
            if mask is not None:
                set_keras_mask(result, next(rows))
            self._gathered[self._key(leaf)] = leaf, result

    def _equally_wide(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Pads with zeros what is wider on another rank, as padded sequences are that each rank has batched."""
        is_open = [self._open_axes(tensor) for tensor in tensors]
        wide = [tensor for tensor, axes in zip(tensors, is_open, strict=True) if any(axes)]
        if not wide:
            return tensors
        shapes = [tf.shape(tensor, tf.int64) for tensor in wide]
        own = tf.concat(shapes, 0) * tf.cast(self._step.active, tf.int64)
        (all_shapes,) = self._engine.allgather([own[tf.newaxis]])
        widest = iter(tf.split(tf.reduce_max(all_shapes, axis=0), [tensor.shape.rank for tensor in wide]))
        own_shapes = iter(shapes)
        return [
            _resized(tensor, tf.where(axes, next(widest), next(own_shapes))) if any(axes) else tensor
            for tensor, axes in zip(tensors, is_open, strict=True)
        ]

    def _open_axes(self, tensor: tf.Tensor) -> list[bool]:
        """Returns by axis whether ranks may differ in a tensor's size; nothing if the number of axes is not known."""
        if tensor.shape.rank is None:
            return []
        return [
            axis > 0 and (tf.executing_eagerly() or tensor.shape[axis] is None) for axis in range(tensor.shape.rank)
        ]

    def _warn_of_large_rows(self, leaves: list[Any]) -> None:
        parts = [part for leaf in leaves for part in _components(leaf) if part.shape.rank is not None]
        size = sum(part.dtype.size * math.prod(n or 1 for n in part.shape[1:]) for part in parts)
        if size > LARGE_ROW and self._engine.rank == 0:
            _warn_once(
                f"A loss or a metric is computed from the rows of all ranks, {size:,} bytes each, which are sent in "
                "each step: kdist does not know that it is a mean over the rows. Fix, if that is too slow: use one of "
                "keras.losses or keras.metrics, or add the mean over this rank's rows by `add_loss`."
            )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _is_batch(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):  # in eager steps
        return leaf.ndim > 0
    return isinstance(leaf, tf.RaggedTensor) or (tf.is_tensor(leaf) and leaf.shape.rank != 0)


def _components(leaf: Any) -> list[tf.Tensor]:
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values, *leaf.nested_row_lengths()]
    return [tf.convert_to_tensor(leaf)]


def _resized(tensor: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    kept = tf.minimum(tf.shape(tensor, tf.int64), shape)
    return tf.pad(tf.slice(tensor, tf.zeros_like(kept), kept), tf.stack([tf.zeros_like(kept), shape - kept], axis=1))


def _composed(leaf: Any, components: list[tf.Tensor]) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(components[0], components[1:])
    return components[0]
