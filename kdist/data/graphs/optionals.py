"""Structures of tensors as TensorFlow's optionals: scalars that pass through `tf.data` by reference, of any shapes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def to_optional(structure: Any) -> Any:
    """Returns a scalar variant tensor that holds a structure of dense, sparse or ragged tensors."""
    tensors = [part for part in tf.nest.flatten(structure, expand_composites=True) if part is not None]
    return tf.raw_ops.OptionalFromValue(components=tensors)


def empty_optional() -> Any:
    """Returns a scalar variant tensor that holds nothing."""
    return tf.raw_ops.OptionalNone()


def from_optional(spec: Any, optional: Any) -> Any:
    """Returns the structure that an optional holds.

    Args:
        spec: structure of the specs of its tensors.
        optional: scalar variant tensor.
    """
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = [part for part in flat if isinstance(part, tf.TensorSpec)]
    tensors = iter(
        tf.raw_ops.OptionalGetValue(
            optional=optional,
            output_types=[part.dtype for part in parts],
            output_shapes=[part.shape for part in parts],
        )
    )
    leaves = [next(tensors) if isinstance(part, tf.TensorSpec) else None for part in flat]
    return tf.nest.pack_sequence_as(spec, leaves, expand_composites=True)
