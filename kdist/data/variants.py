"""Structures of tensors packed into one scalar: they pass through `tf.data` by reference, whatever their shapes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def wrap(structure: Any) -> Any:
    """Returns a scalar variant tensor that holds a structure of dense, sparse or ragged tensors."""
    tensors = [part for part in tf.nest.flatten(structure, expand_composites=True) if part is not None]
    return tf.raw_ops.OptionalFromValue(components=tensors)


def blank() -> Any:
    """Returns a scalar variant tensor that holds nothing."""
    return tf.raw_ops.OptionalNone()


def unwrap(spec: Any, variant: Any) -> Any:
    """Returns the structure that `wrap` packed.

    Args:
        spec: structure of its specs.
        variant: scalar variant tensor.
    """
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = [part for part in flat if isinstance(part, tf.TensorSpec)]
    tensors = iter(
        tf.raw_ops.OptionalGetValue(
            optional=variant,
            output_types=[part.dtype for part in parts],
            output_shapes=[part.shape for part in parts],
        )
    )
    leaves = [next(tensors) if isinstance(part, tf.TensorSpec) else None for part in flat]
    return tf.nest.pack_sequence_as(spec, leaves, expand_composites=True)
