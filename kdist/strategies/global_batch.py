"""The global batch on every rank: targets, predictions and weights of all ranks, for losses and metrics of all rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.keras_hooks.losses import get_keras_mask, set_keras_mask
from kdist.reports.log import once
from kdist.strategies.differentiable import rows_of_all_ranks, sparse_rows_of_all_ranks, sum_over_ranks
from kdist.strategies.open_step import OpenStep

LARGE_MESSAGE = 2**22  # bytes of a rank in a step

_TOO_LARGE = (
    "{} is computed from the rows of all ranks, of which this rank sends {:,} bytes in a step: it is not known to "
    "be a mean over the rows. Fix, if that is too slow: use one of keras.losses or keras.metrics that is (Hinge, Dice, "
    "Tversky and Circle are not), or add the mean over this rank's rows by `add_loss`."
)
_OTHER_WIDTHS = (
    "{} is computed from batches that are wider on one rank than on another, padded with zeros to the widest. That "
    "is exact if it leaves out targets of 0; else it counts the padding. Fix, if it does not leave them out: pad all "
    "batches to one width (`padded_shapes` of `padded_batch`), or give the model a mask (`mask_zero=True`)."
)


class GlobalBatch:
    """Gathers the rows of a step, each tensor once, in the order of the global batch.

    What is computed from them must be computed equally on all ranks: then the gradient of this rank's rows needs no
    message.

    Args:
        step: `OpenStep`.
        has_other_rows: bool, whether losses and metrics may be called on other rows than the step's: by a `train_step`
            or a `compute_loss` of the user's.

    Attributes:
        is_in_call: bool, whether a function of the rows of all ranks runs: what it draws must be equal on them.
    """

    def __init__(self, step: OpenStep, *, has_other_rows: bool) -> None:
        self._step = step
        self._has_other_rows = has_other_rows
        self._gathered: dict[tuple[int, int], tuple[Any, Any]] = {}  # with the tensor, whose id is the key
        self.is_in_call = False

    def call(self, who: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with the rows of all ranks in the place of this rank's, and Keras' masks with them.

        Of scalar tensors it gets the mean, weighted by the ranks' rows, of integers the sum, and of `bool` whether any
        is true. What has no rows, or is no number, stays as it is.

        Collective: every rank must call this, in the same order.

        Args:
            who: str, what the function is, for warnings.
            function: callable.
            *args: its arguments, structures of tensors.
            **kwargs: the same.
        """
        if self._step.engine.size == 1:  # with local SGD
            return function(*args, **kwargs)
        args, kwargs = self._gather((args, kwargs), who)
        with self.in_call():
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """A context in which a function of the rows of all ranks is called."""
        outer, self.is_in_call = self.is_in_call, True
        try:
            yield
        finally:
            self.is_in_call = outer

    def equally_wide(self, tensors: list[tf.Tensor], who: str | None = None) -> list[tf.Tensor]:
        """Pads with zeros what is wider on another rank, as padded sequences are that each rank has batched.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: list of tensors with rows; only where a graph leaves the width open is anything sent.
            who: str or `None`, what it is for, for a warning of other widths; `None` for no warning.
        """
        is_open = [self._open_axes(tensor) for tensor in tensors]
        wide = [tensor for tensor, axes in zip(tensors, is_open, strict=True) if any(axes)]
        if not wide:
            return tensors
        shapes = [tf.shape(tensor, tf.int64) for tensor in wide]
        own = tf.concat(shapes, 0) * tf.cast(self._step.active, tf.int64)
        (all_shapes,) = self._step.engine.allgather([own[tf.newaxis]])
        largest = tf.reduce_max(all_shapes, axis=0)
        if who is not None:
            compared = tf.constant([is_compared for axes in is_open if any(axes) for is_compared in axes])
            of_active = tf.reduce_any(all_shapes > 0, axis=1, keepdims=True)
            self._warn_if(tf.reduce_any((all_shapes < largest) & compared & of_active), _OTHER_WIDTHS, who)
        widest = iter(tf.split(largest, [tensor.shape.rank for tensor in wide]))
        own_shapes = iter(shapes)
        return [
            _resized(tensor, tf.where(axes, next(widest), next(own_shapes))) if any(axes) else tensor
            for tensor, axes in zip(tensors, is_open, strict=True)
        ]

    def _gather(self, values: Any, who: str) -> Any:
        leaves = keras.tree.flatten(values)
        new = {self._key(x): x for x in leaves if self._is_batch(x) and self._key(x) not in self._gathered}
        for key, leaf in new.items():
            if isinstance(leaf, tf.SparseTensor):
                self._gathered[key] = leaf, sparse_rows_of_all_ranks(self._step, leaf)
        if dense := [leaf for leaf in new.values() if not isinstance(leaf, tf.SparseTensor)]:
            self._gather_rows(dense, who, has_mask=any(get_keras_mask(leaf) is not None for leaf in leaves))
        return keras.tree.pack_sequence_as(values, [self._of_all_ranks(leaf) for leaf in leaves])

    def _of_all_ranks(self, leaf: Any) -> Any:
        if self._is_batch(leaf):
            return self._gathered[self._key(leaf)][1]
        if not tf.is_tensor(leaf) or leaf.shape.rank != 0 or leaf.dtype == tf.string:
            return leaf
        return scalar_of_all_ranks(self._step, leaf)

    def _is_batch(self, leaf: Any) -> bool:
        """Returns whether a value has rows. What does not depend on the step's has none, as a table of codes."""
        if isinstance(leaf, np.ndarray):  # in eager steps
            return leaf.ndim > 0
        if not isinstance(leaf, tf.RaggedTensor) and not (tf.is_tensor(leaf) and leaf.shape.rank != 0):
            return False
        if self._has_other_rows or tf.executing_eagerly():
            return True
        return any(map(self._step.may_differ, tf.nest.flatten(leaf, expand_composites=True)))

    def _key(self, leaf: Any) -> tuple[int, int]:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return id(leaf), id(graph)

    def _gather_rows(self, leaves: list[Any], who: str, *, has_mask: bool) -> None:
        masks = [get_keras_mask(leaf) for leaf in leaves]
        parts = [*map(_components, leaves), *([mask] for mask in masks if mask is not None)]
        local = [each for part in parts for each in part]
        size = tf.add_n([tf.size(each, tf.int64) * each.dtype.size for each in local])
        self._warn_if(size > LARGE_MESSAGE, _TOO_LARGE, who, size)
        local = self.equally_wide(local, None if has_mask else who)
        rows = iter(rows_of_all_ranks(self._step.engine, self._step, local, same_on_all=True))
        gathered = [_composed(leaf, [next(rows) for _ in _components(leaf)]) for leaf in leaves]
        for leaf, mask, result in zip(leaves, masks, gathered, strict=True):
            if mask is not None:
                set_keras_mask(result, next(rows))
            self._gathered[self._key(leaf)] = leaf, result

    def _open_axes(self, tensor: tf.Tensor) -> list[bool]:
        """Returns by axis whether ranks may differ in a tensor's size; nothing if the number of axes is not known."""
        if tensor.shape.rank is None:
            return []
        return [
            axis > 0 and (tf.executing_eagerly() or tensor.shape[axis] is None) for axis in range(tensor.shape.rank)
        ]

    def _warn_if(self, condition: tf.Tensor, text: str, who: str, *values: tf.Tensor) -> None:
        """Warns once of a loss or a metric, on rank 0, when the step runs."""

        def warn(*numbers: Any) -> Any:
            once.warning(text.format(who, *numbers), key=f"{who}: {text}")
            return np.bool_(True)

        if self._step.engine.rank == 0:
            tf.cond(condition, lambda: tf.numpy_function(warn, values, tf.bool), lambda: tf.constant(False))


def scalar_of_all_ranks(step: OpenStep, value: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a scalar, weighted by the ranks' rows; of integers the sum, of `bool` whether any is true.

    Collective: every rank must call this, in the same order.
    """
    if value.dtype == tf.bool:
        return sum_over_ranks(step.engine, step, [tf.cast(value, tf.int32)])[0] > 0
    if value.dtype.is_floating or value.dtype.is_complex:
        value = value * tf.cast(step.weight, value.dtype)
    return sum_over_ranks(step.engine, step, [value])[0]


def _components(leaf: Any) -> list[tf.Tensor]:
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values, *leaf.nested_row_lengths()]
    return [tf.convert_to_tensor(leaf)]


def _composed(leaf: Any, components: list[tf.Tensor]) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(components[0], components[1:])
    return components[0]


def _resized(tensor: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    kept = tf.minimum(tf.shape(tensor, tf.int64), shape)
    return tf.pad(tf.slice(tensor, tf.zeros_like(kept), kept), tf.stack([tf.zeros_like(kept), shape - kept], axis=1))
