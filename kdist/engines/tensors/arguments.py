"""The checks of arguments that every engine makes before it sends anything."""

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


def for_reduce_scatter(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.reduce_scatter` as tensors, or raises `EngineError`."""
    found = []
    for value, place in _numbered(tensors, "reduce_scatter"):
        tensor = _tensor(value, place, _SUMMABLE)
        _check_rows(tensor, place, "split into rows")
        _check_known(tensor.shape, place)
        found.append(tensor)
    return found


def for_allgather(
    tensors: Sequence[Any], lengths: Sequence[Sequence[int]] | None, rank: int, size: int
) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.allgather` as tensors, or raises `EngineError`."""
    found = []
    for value, place in _numbered(tensors, "allgather"):
        tensor = _tensor(value, place, _SENDABLE)
        _check_rows(tensor, place, "concatenated")
        found.append(tensor)
    if lengths is None:
        return found
    own = [counts[rank] if len(counts) == size else None for counts in lengths]
    known = [tensor.shape[0] for tensor in found]
    if len(own) != len(known) or any(mine not in (rows, None) for mine, rows in zip(known, own, strict=True)):
        raise EngineError(
            f"allgather: the tensors have other rows than their lengths say. Received: {known} rows on rank {rank}, "
            f"and the lengths {[list(each) for each in lengths]}. Expected: for each tensor its rows on each of {size} "
            "ranks. Fix: compute the lengths as the tensors are, or leave them out."
        )
    return found


def for_alltoall(tensors: Sequence[Any], size: int) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.alltoall` as tensors, or raises `EngineError`."""
    found = []
    for value, place in _numbered(tensors, "alltoall"):
        tensor = _tensor(value, place, _SENDABLE)
        if tensor.shape.rank is None or not tensor.shape.is_fully_defined() or tensor.shape[:1] != [size]:
            raise EngineError(
                f"{place} has no row for each rank. Received: the shape {tensor.shape}. Expected: a known shape whose "
                f"first dimension is the number of ranks, {size}. Fix: reshape it, padded with zeros."
            )
        found.append(tensor)
    return found


def for_alltoallv(tensors: Sequence[Any], counts: Any, size: int) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the arguments of `Engine.alltoallv` as tensors, counts of `int64`, or raises `EngineError`.

    Counts that are known only when a graph runs are checked there.
    """
    found = []
    for value, place in _numbered(tensors, "alltoallv"):
        tensor = _tensor(value, place, _SENDABLE)
        _check_rows(tensor, place, "sent by rows")
        _check_known(tensor.shape[1:], place)
        found.append(tensor)
    counts = tf.convert_to_tensor(counts)
    known = tf.get_static_value(counts)
    if not counts.dtype.is_integer or counts.shape != [size] or (known is not None and known.min() < 0):
        raise EngineError(
            f"alltoallv has no count for each rank. Received: counts of shape {counts.shape} and {counts.dtype.name}, "
            f"{'computed in a graph' if known is None else known.tolist()}. Expected: {size} integers from 0 on, one "
            "for each rank. Fix: count the rows for each rank, 0 where there are none."
        )
    for index, tensor in enumerate(found):
        if known is not None and tensor.shape[0] not in (None, int(known.sum())):
            raise EngineError(
                f"alltoallv: tensor {index} of {len(found)} has another number of rows than the counts. Received: "
                f"{tensor.shape[0]} rows, and counts {known.tolist()}. Expected: {int(known.sum())} rows, their sum. "
                "Fix: sort the rows by the rank that gets them, and count them."
            )
    counts = tf.cast(counts, tf.int64)
    if known is None or any(tensor.shape[0] is None for tensor in found):
        fits = [tf.reduce_all(counts >= 0)]
        fits += [tf.equal(tf.shape(tensor, tf.int64)[0], tf.reduce_sum(counts)) for tensor in found]
        message = "alltoallv: the counts do not add up to the rows of each tensor"
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [message, counts])]):
            counts = tf.identity(counts)
    return found, counts


def for_broadcast(tensors: Sequence[Any], root: int, size: int) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.broadcast` as tensors, or raises `EngineError`."""
    check_root(root, size)
    return [_tensor(value, place, _SENDABLE) for value, place in _numbered(tensors, "broadcast")]


def check_root(root: int, size: int) -> None:
    """Raises `EngineError` if `root` is no rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise EngineError(
            f"`root` is out of range. Received: root={root!r}. Expected: an int from 0 to {size - 1}. "
            f"Fix: give a rank of this engine, which has {size} rank(s)."
        )


def for_send(tensors: Sequence[Any], to: int, rank: int, size: int) -> list[tf.Tensor]:
    """Returns the arguments of `Engine.send` as tensors, or raises `EngineError`."""
    _check_peer("to", to, rank, size)
    found = []
    for value, place in _numbered(tensors, "send"):
        found.append(_tensor(value, place, _SENDABLE))
        _check_known(found[-1].shape, place)
    return found


def for_recv(like: Sequence[Any], source: int, rank: int, size: int) -> list[tf.TensorSpec]:
    """Returns the arguments of `Engine.recv` as specs, or raises `EngineError`."""
    _check_peer("source", source, rank, size)
    found = []
    for value, place in _numbered(like, "recv"):
        spec = value if isinstance(value, tf.TensorSpec) else _tensor(value, place, _SENDABLE)
        _check_dtype(spec, place, _SENDABLE)
        _check_known(spec.shape, place)
        found.append(tf.TensorSpec(spec.shape, spec.dtype))
    return found


def check_group(ranks: Sequence[int], rank: int, size: int) -> list[int]:
    """Returns the argument of `Engine.group` as a list, or raises `EngineError`."""
    given = list(ranks)
    if given != sorted(set(given)) or rank not in given or not 0 <= given[0] <= given[-1] < size:
        raise EngineError(
            f"These ranks are not a group of rank {rank}. Received: {given}. Expected: ranks from 0 to {size - 1} in "
            f"ascending order, {rank} among them. Fix: give the ranks of the group that this rank belongs to."
        )
    return given


def _check_peer(name: str, peer: int, rank: int, size: int) -> None:
    if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < size or peer == rank:
        raise EngineError(
            f"`{name}` names no other rank. Received: {name}={peer!r} on rank {rank}. Expected: an int from 0 to "
            f"{size - 1} that is not {rank}. Fix: give another rank of this engine, which has {size} rank(s)."
        )


def _check_rows(tensor: tf.Tensor, place: str, purpose: str) -> None:
    if tensor.shape.rank == 0:
        raise EngineError(
            f"{place} cannot be {purpose}. Received: a scalar. Expected: a tensor with a first axis. "
            "Fix: give it one with tf.reshape(x, [1])."
        )


def _check_known(shape: tf.TensorShape, place: str) -> None:
    if not shape.is_fully_defined():
        raise EngineError(
            f"{place} has a shape that is not known when the graph is traced. Received: {shape}. Expected: known "
            "dimensions. Fix: set them with tf.ensure_shape."
        )


def _numbered(tensors: Sequence[Any], collective: str) -> list[tuple[Any, str]]:
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        raise EngineError(
            f"{collective} takes several tensors at once. Received: {type(tensors).__name__}. "
            "Expected: a list or tuple of tensors. Fix: put a single tensor into a list."
        )
    return [(value, f"{collective}: tensor {i} of {len(tensors)}") for i, value in enumerate(tensors)]


def _tensor(value: Any, place: str, dtypes: frozenset[tf.DType]) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):  # TensorFlow would convert it to a dense tensor silently
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
