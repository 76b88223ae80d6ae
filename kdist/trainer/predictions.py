"""All ranks' predictions in the order of the rows: arrays, strings, ragged and sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.step.step import Step
from kdist.strategies.differentiable import sparse_rows_of_all_ranks
from kdist.strategies.global_batch import scalar_of_all_ranks
from kdist.strategies.values import values_of_all_ranks


def gather_rows(
    engine: Engine, step: Step, output: tf.Tensor | tf.RaggedTensor | tf.SparseTensor, *, widths_differ: bool
) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    """Concatenates the ranks' rows of one output.

    Scalars are averaged, and integers are summed. What a graph does not compute from the rows, as a table of codes,
    stays as it is.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        step: `Step`, the step of the output, whose graph does not know the number of rows (`with_unknown_numbers`);
            the output of a rank without rows is dropped.
        output: tensor, `tf.RaggedTensor` or `tf.SparseTensor`, the model's output for this rank's rows.
        widths_differ: bool, whether dimensions after the first may differ between the ranks, as in their batches. The
            result is then ragged in these, and in dimensions that are unknown in a graph; see `as_dense`.
    """
    if not isinstance(output, (tf.RaggedTensor, tf.SparseTensor)):
        output = tf.convert_to_tensor(output)
    if not any(step.depends_on_rows(each) for each in tf.nest.flatten(output, expand_composites=True)):
        return output
    if isinstance(output, tf.SparseTensor):
        return sparse_rows_of_all_ranks(step, output)
    if not isinstance(output, tf.RaggedTensor) and output.shape.rank == 0:
        return output if output.dtype == tf.string else _scalar(step, output)
    local = output[: tf.where(step.active, tf.int32.max, 0)]
    if not isinstance(local, tf.RaggedTensor) and local.shape.rank is not None:
        is_graph = not tf.executing_eagerly()
        axes = range(1, local.shape.rank)
        open_axes = [axis for axis in axes if widths_differ or (is_graph and local.shape[axis] is None)]
        if open_axes:
            local = tf.RaggedTensor.from_tensor(local, ragged_rank=open_axes[-1])
    if not isinstance(local, tf.RaggedTensor):
        return values_of_all_ranks(engine, [local])[0]
    values, *lengths = values_of_all_ranks(engine, [local.flat_values, *local.nested_row_lengths()])
    return tf.RaggedTensor.from_nested_row_lengths(values, lengths)


def _scalar(step: Step, value: tf.Tensor) -> tf.Tensor:
    if not value.dtype.is_integer:
        return scalar_of_all_ranks(step, value)
    (total,) = step.engine.allreduce([tf.where(step.active, value, tf.zeros_like(value))])
    return total


def as_dense(predictions: Any, was_dense: Sequence[bool]) -> Any:
    """Returns predictions without ragged dimensions in which the rows do not differ.

    Args:
        predictions: structure of arrays and `tf.RaggedTensor`; that of a user's method may be another one, of anything.
        was_dense: sequence of bool, for each leaf whether the model's output was dense. Others are not changed.
    """
    leaves = keras.tree.flatten(predictions)
    if len(leaves) != len(was_dense):
        was_dense = [all(was_dense)] * len(leaves)
    leaves = [
        _densified(leaf) if dense and isinstance(leaf, tf.RaggedTensor) else leaf
        for leaf, dense in zip(leaves, was_dense, strict=True)
    ]
    return keras.tree.pack_sequence_as(predictions, leaves)


def _densified(ragged: tf.RaggedTensor) -> Any:
    """Makes inner dimensions uniform in which the rows do not differ."""
    values = ragged.flat_values.numpy()
    lengths = [level.numpy() for level in ragged.nested_row_lengths()]
    while lengths and (lengths[-1] == lengths[-1][:1]).all():
        width = lengths[-1][0] if len(lengths[-1]) else 0
        values = values.reshape(len(lengths.pop()), width, *values.shape[1:])
    return tf.RaggedTensor.from_nested_row_lengths(values, lengths) if lengths else values
