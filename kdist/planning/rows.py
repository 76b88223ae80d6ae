"""Rows of what a script feeds to a model: the bytes of all, the first ones, and these again and again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def held_bytes(array: Any) -> int:
    """Returns the bytes that an array or a tensor holds in memory; 0 for what is neither, and for mapped files.

    Args:
        array: array, `tf.Tensor`, `tf.RaggedTensor`, `tf.SparseTensor`, frame of pandas, or anything else.
    """
    if isinstance(array, np.memmap) and array.filename is not None:
        return 0
    if hasattr(array, "memory_usage"):  # of pandas
        return int(np.sum(array.memory_usage()))
    if isinstance(array, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return sum(int(tf.size(each)) * each.dtype.size for each in tf.nest.flatten(array, expand_composites=True))
    return int(getattr(array, "nbytes", 0))


def copied_bytes(array: Any) -> int:
    """Returns the bytes of the tensor that Keras makes of an array: floats in its own precision, others as they are.

    Args:
        array: as that of `held_bytes`; of tensors none is made.
    """
    if not isinstance(array, np.ndarray) and not hasattr(array, "memory_usage"):
        return 0
    dtype = np.asarray(array[:0]).dtype
    return int(array.size) * (np.dtype(keras.config.floatx()) if dtype.kind == "f" else dtype).itemsize


def fed(array: Any) -> Any:
    """Returns what `fit` feeds of an array: floats in Keras' own precision; others, and what is no array, as they are.

    Args:
        array: what `first_rows` has returned.
    """
    is_float = isinstance(array, np.ndarray) and array.dtype.kind == "f"
    return array.astype(keras.config.floatx()) if is_float else array


def number_of_rows(batch: Any) -> int:
    """Returns how many rows a batch has.

    Args:
        batch: nested arrays, tensors and `None`.
    """
    first = next(each for each in tf.nest.flatten(batch) if each is not None)
    return int(np.shape(first)[0])


def first_rows(array: Any, rows: int) -> Any:
    """Returns the first rows of an array or a tensor: a NumPy array if it is dense and has numbers.

    Args:
        array: array or tensor of any kind, or `None`, which is returned.
        rows: int, how many.
    """
    if array is None:
        return None
    if isinstance(array, tf.SparseTensor):
        shape = array.dense_shape
        return tf.sparse.slice(array, tf.zeros_like(shape), tf.concat([[rows], shape[1:]], axis=0))
    found = array[:rows]
    if isinstance(found, tf.RaggedTensor):
        return found
    found = np.asarray(found)
    return tf.constant(found) if found.dtype.kind in "OSU" else found  # strings


def repeated(array: Any, rows: int) -> Any:
    """Returns as many rows, those of an array again and again.

    Args:
        array: what `first_rows` has returned.
        rows: int.
    """
    if array is None:
        return None
    number = number_of_rows(array)
    if isinstance(array, tf.SparseTensor):
        return first_rows(tf.sparse.concat(0, [array] * -(-rows // number)), rows)
    places = np.arange(rows) % number
    return tf.gather(array, places) if isinstance(array, (tf.Tensor, tf.RaggedTensor)) else array[places]


def keras_tensor(array: Any, compute_dtype: str) -> Any:
    """Returns the `keras.KerasTensor` of an array's kind, of any number of rows; `None` for `None`.

    Args:
        array: what `first_rows` has returned.
        compute_dtype: str, that of floats.
    """
    if array is None:
        return None
    dtype = tf.as_dtype(array.dtype)
    return keras.KerasTensor(
        (None, *array.shape[1:]),
        compute_dtype if dtype.is_floating else dtype.name,
        sparse=isinstance(array, tf.SparseTensor),
        ragged=isinstance(array, tf.RaggedTensor),
    )


def tensor_spec(tensor: Any, rows: int) -> Any:
    """Returns what a graph takes for a `keras.KerasTensor`.

    Args:
        tensor: `keras.KerasTensor`.
        rows: int, how many.
    """
    shape = (rows, *tensor.shape[1:])
    if getattr(tensor, "sparse", False):
        return tf.SparseTensorSpec(shape, tensor.dtype)
    if getattr(tensor, "ragged", False):
        ragged_rank = max((place for place, length in enumerate(shape) if length is None), default=1)
        return tf.RaggedTensorSpec(shape, tensor.dtype, ragged_rank)
    return tf.TensorSpec(shape, tensor.dtype)
