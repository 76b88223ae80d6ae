"""Checks that every engine makes of what it is given, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.errors import EngineError

_SUMMABLE = frozenset(
    {
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)
_SENDABLE = _SUMMABLE | {tf.bool}


def for_allreduce(tensors: Sequence[Any]) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns the arguments of `Engine.allreduce` as tensors and `tf.IndexedSlices`, or raises `EngineError`."""
    return [
        _slices(tensor, place) if isinstance(tensor, tf.IndexedSlices) else _tensor(tensor, place, _SUMMABLE)
        for tensor, place in _numbered(tensors, "allreduce")
    ]


def for_allgather(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.allgather` as tensors, or raises `EngineError`."""
    found = []
    for value, place in _numbered(tensors, "allgather"):
        tensor = _tensor(value, place, _SENDABLE)
        if tensor.shape.rank == 0:
            raise EngineError(
                f"{place} cannot be concatenated. Received: a scalar. Expected: a tensor with a first axis. "
                "Fix: give it one with tf.reshape(x, [1])."
            )
        found.append(tensor)
    return found


def for_alltoall(tensors: Sequence[Any], size: int) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.alltoall` as tensors, or raises `EngineError`."""
    found = []
    for value, place in _numbered(tensors, "alltoall"):
        tensor = _tensor(value, place, _SENDABLE)
        if tensor.shape.rank is None or not tensor.shape.is_fully_defined() or tensor.shape[:1] != [size]:
            raise EngineError(
                f"{place} has no row for each rank. Received: the shape {tensor.shape}. Expected: a known shape whose "
                f"first dimension is the number of ranks, {size}. Fix: reshape it, filled up with zeros."
            )
        found.append(tensor)
    return found


def for_broadcast(tensors: Sequence[Any], root: int, size: int) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.broadcast` as tensors, or raises `EngineError`."""
    check_root(root, size)
    return [_tensor(value, place, _SENDABLE) for value, place in _numbered(tensors, "broadcast")]


def check_root(root: int, size: int) -> None:
    """Raises `EngineError` if `root` is no rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise EngineError(
            f"There is no such root. Received: root={root!r}. Expected: an int from 0 to {size - 1}, "
            f"as the job has {size} rank(s). Fix: give a rank of this job."
        )


def _numbered(tensors: Sequence[Any], collective: str) -> list[tuple[Any, str]]:
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        raise EngineError(
            f"{collective} takes several tensors at once. Received: {type(tensors).__name__}. "
            "Expected: a list or tuple of tensors. Fix: put a single tensor into a list."
        )
    return [(value, f"{collective}: tensor {i} of {len(tensors)}") for i, value in enumerate(tensors)]


def _tensor(value: Any, place: str, dtypes: frozenset[tf.DType]) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):  # TensorFlow would make it dense without a word
        raise EngineError(
            f"{place} must be dense. Received: tf.IndexedSlices. Expected: a tf.Tensor. "
            "Fix: send its values and its indices, or tf.convert_to_tensor of it."
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as err:
        raise EngineError(
            f"{place} is no tensor. Received: {type(value).__name__}. Expected: a tf.Tensor. "
            "Fix: leave it out on all ranks, or send zeros in its place."
        ) from err
    _check_dtype(tensor, place, dtypes)
    return tensor


def _slices(slices: tf.IndexedSlices, place: str) -> tf.IndexedSlices:
    _check_dtype(slices.values, place, _SUMMABLE)
    return slices


def _check_dtype(tensor: tf.Tensor, place: str, dtypes: frozenset[tf.DType]) -> None:
    if tensor.dtype not in dtypes:
        raise EngineError(
            f"{place} has a dtype that cannot be {'summed' if dtypes is _SUMMABLE else 'sent'}. "
            f"Received: {tensor.dtype.name}. Expected: one of {', '.join(sorted(dtype.name for dtype in dtypes))}. "
            "Fix: cast it first."
        )
