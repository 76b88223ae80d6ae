"""Agreement of the ranks on which variables have a gradient, where a branch in Python may leave some out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import innermost, trained_variables
from kdist.keras_hooks.variables import key_of, raw_variable


def agreed_gradients(
    engine: Engine, optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns an update's variables and gradients, in an eager step with those that other ranks alone have.

    An eager step may ask for its rows in Python, and use other layers on each rank. A gradient is zeros where a rank
    has none. Where all ranks have gradients of the same variables, or in a graph, nothing changes.

    Collective in an eager step: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks of the step communicate.
        optimizer: `keras.optimizers.Optimizer`.
        variables: sequence of variables.
        gradients: sequence of tensors, `tf.IndexedSlices` and `None`, one for each variable.
    """
    if engine.size == 1 or not tf.executing_eagerly():
        return list(variables), list(gradients)
    inner = innermost(optimizer)
    known = [each for each in (trained_variables(inner) if inner.built else variables) if table_of(each) is None]
    given = {key_of(v): gradient for v, gradient in zip(variables, gradients, strict=True) if gradient is not None}
    kinds = [_kind(given.get(key_of(each))) for each in known]
    (counts,) = engine.allreduce([tf.one_hot(kinds, 3, dtype=tf.int32)])
    numbers = counts.numpy()
    if (numbers.max(axis=1, initial=0) == engine.size).all():
        return list(variables), list(gradients)
    others = [(v, g) for v, g in zip(variables, gradients, strict=True) if all(v is not each for each in known)]
    agreed = [
        (each, _dense(each, given.get(key_of(each))) if of_kind.max() < engine.size else given[key_of(each)])
        for each, of_kind in zip(known, numbers, strict=True)
        if of_kind[0] < engine.size
    ]
    return [each for each, _ in [*agreed, *others]], [gradient for _, gradient in [*agreed, *others]]


def _kind(gradient: Any) -> int:
    return 0 if gradient is None else 2 if isinstance(gradient, tf.IndexedSlices) else 1


def _dense(variable: Any, gradient: Any) -> tf.Tensor:
    raw = raw_variable(variable)
    return tf.zeros(raw.shape, raw.dtype) if gradient is None else tf.convert_to_tensor(gradient)
