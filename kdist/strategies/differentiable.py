"""Collectives that gradients pass through, in a replica's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.strategies.open_step import OpenStep
from kdist.strategies.values import values_of_all_ranks


def sum_over_ranks(
    engine: Engine, step: OpenStep | None, tensors: Sequence[tf.Tensor], divisor: float = 1
) -> list[tf.Tensor]:
    """Sums tensors over the ranks; a gradient is that of the loss of all ranks, and has gradients itself.

    Collective: every rank must call this, in the same order; the backward pass, too.

    Args:
        engine: `Engine`, how the ranks communicate.
        step: the open step, whose ranks without rows add nothing, or `None`.
        tensors: sequence of tensors, of equal shapes on all ranks.
        divisor: number by which the sums are divided.

    Returns:
        A list of tensors, equal on all ranks.
    """

    def total(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return sum_over_ranks(engine, step, values, divisor)

    def reduce(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        sums = engine.allreduce([_of_active(step, value) for value in values])
        sums = sums if divisor == 1 else [value / tf.cast(divisor, value.dtype) for value in sums]
        return sums, lambda *upstream: _of_all_losses(total, step, upstream)

    return list(tf.custom_gradient(reduce)(*tensors))


def rows_of_all_ranks(
    engine: Engine, step: OpenStep | None, tensors: Sequence[tf.Tensor], *, same_on_all: bool = False
) -> list[tf.Tensor]:
    """Concatenates tensors over the ranks along their first axis; a gradient is that of the loss of all ranks.

    The gradient has gradients itself.

    Collective: every rank must call this, in the same order; the backward pass, too, and with `same_on_all` that of a
    gradient alone.

    Args:
        engine: `Engine`, how the ranks communicate.
        step: the open step, whose ranks without rows add nothing, or `None`.
        tensors: sequence of tensors of rank at least 1, of numbers, `bool` or strings; only their first dimensions may
            differ between the ranks.
        same_on_all: bool, whether all ranks compute the same from the result: then the loss of one is that of all.

    Returns:
        A list of tensors. Their first dimensions are not known in a graph.
    """
    sizes = [tf.shape(tensor, tf.int64)[0] for tensor in tensors]
    sent = sizes if step is None else [tf.where(step.active, size, 0) for size in sizes]
    rows = [tf.stop_gradient(tensor)[:size] for tensor, size in zip(tensors, sent, strict=True)]
    *gathered, counts = values_of_all_ranks(engine, [*rows, tf.stack(sent)[tf.newaxis]])
    for tensor, result in zip(tensors, gathered, strict=True):
        if tensor.shape.rank is not None:
            result.set_shape([None, *tensor.shape[1:]])
    starts = tf.reduce_sum(counts[: engine.rank], axis=0)
    places = [i for i, tensor in enumerate(tensors) if tensor.dtype.is_floating or tensor.dtype.is_complex]

    def own_part(place: int, total: tf.Tensor) -> tf.Tensor:
        part = total[starts[place] : starts[place] + sent[place]]
        after = tf.one_hot(0, tf.rank(part), sizes[place] - sent[place], tf.constant(0, tf.int64))
        return tf.reshape(tf.pad(part, tf.stack([tf.zeros_like(after), after], axis=1)), tf.shape(tensors[place]))

    def own_parts(*totals: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            weighted = [each if step is None else _by_weight(tf.multiply, step, each) for each in upstream]
            return rows_of_all_ranks(engine, step, weighted, same_on_all=True)

        return list(map(own_part, places, totals)), gradient

    def concatenate(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if not same_on_all:
                totals = _of_all_losses(lambda each: sum_over_ranks(engine, step, each), step, upstream)
                return list(map(own_part, places, totals))
            parts = tf.custom_gradient(own_parts)(*map(tf.convert_to_tensor, upstream))  # it may be sparse
            # The step multiplies by the weight.
            return list(parts) if step is None else [_divided_by_weight(step, value) for value in parts]

        return [tf.identity(gathered[place]) for place in places], gradient

    if places:
        for place, result in zip(places, tf.custom_gradient(concatenate)(*(tensors[i] for i in places)), strict=True):
            gathered[place] = result
    return gathered


def sparse_rows_of_all_ranks(step: OpenStep, sparse: tf.SparseTensor) -> tf.SparseTensor:
    """Concatenates a sparse tensor over the ranks along its first axis, for what all ranks compute equally from it.

    Collective: every rank must call this, in the same order.

    Args:
        step: the open step, whose ranks without rows add nothing.
        sparse: `tf.SparseTensor`. On the ranks it may differ in width, too: the result is as wide as the widest.

    Returns:
        A `tf.SparseTensor`, equal on all ranks.
    """
    own = tf.where(step.active, sparse.dense_shape, tf.zeros_like(sparse.dense_shape))
    (shapes,) = step.engine.allgather([own[tf.newaxis]])
    first = tf.reduce_sum(shapes[: step.engine.rank, 0])  # the rows of the ranks before
    indices = tf.concat([sparse.indices[:, :1] + first, sparse.indices[:, 1:]], 1)
    values, indices = rows_of_all_ranks(step.engine, step, [sparse.values, indices], same_on_all=True)
    shape = tf.concat([tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)], 0)
    return tf.SparseTensor(indices, values, shape)


def _of_all_losses(
    total: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]], step: OpenStep | None, upstream: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the gradients of the sum of the ranks' weighted losses, from those of each rank's own loss.

    Where the backward pass starts from the loss alone, the step multiplies what is returned by this rank's weight.
    """
    if step is None:
        return total(upstream)
    if step.loss_is_weighted:
        return [_of_active(step, value) for value in total(upstream)]
    weighted = [_by_weight(tf.multiply, step, value) for value in upstream]
    return [_of_active(step, _divided_by_weight(step, value)) for value in total(weighted)]


def _of_active(step: OpenStep | None, value: tf.Tensor) -> tf.Tensor:
    return value if step is None else tf.where(step.active, value, tf.zeros_like(value))


def _divided_by_weight(step: OpenStep, value: tf.Tensor) -> tf.Tensor:
    return _by_weight(tf.math.divide_no_nan, step, value)


def _by_weight(operation: Callable[..., tf.Tensor], step: OpenStep, value: tf.Tensor) -> tf.Tensor:
    """Multiplies or divides by the weight: 16 bits would round it, and not as the step's loss does."""
    wide = tf.cast(value, tf.float32) if value.dtype.size == 2 else value
    return tf.cast(operation(wide, tf.cast(step.weight, wide.dtype)), value.dtype)
