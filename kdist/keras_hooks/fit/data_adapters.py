"""What Keras' data adapters hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, data_adapter, data_adapter_utils
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from kdist.engines.arrays.fusion import empty

DataAdapter = data_adapter.DataAdapter
_LARGE = 1 << 20  # bytes


def array_parts(adapter: Any) -> tuple[Any, int, int, bool | str] | None:
    """Returns what Keras' adapter for arrays holds, `None` for other adapters.

    Returns:
        A tuple `(inputs, num_samples, batch_size, shuffle)`: `inputs` is a structure of dense, sparse or ragged tensors
        and of `None`.
    """
    if not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return None

    def tensors(part: Any) -> Any:
        if isinstance(part, array_slicing.TensorflowSparseWrapper):  # a tuple itself
            return part.sparse
        if isinstance(part, dict):
            return {key: tensors(value) for key, value in part.items()}
        if isinstance(part, (list, tuple)):
            return tuple(tensors(value) for value in part)  # tf.data takes a list for a tensor
        if isinstance(part, np.ndarray) and part.nbytes >= _LARGE and part.dtype.kind in "fiu" and part.dtype.isnative:
            return _copied(part)
        return part if part is None or isinstance(part, tf.RaggedTensor) else tf.convert_to_tensor(part)

    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    return tensors(inputs), adapter._num_samples, adapter._batch_size, adapter._shuffle


def _copied(array: Any) -> tf.Tensor:
    """Returns an array as a tensor by one copy: TensorFlow makes two, for NumPy seldom aligns memory as it asks for."""
    copy = empty(array.size, array.dtype).reshape(array.shape)
    copy[...] = array
    return tf.experimental.dlpack.from_dlpack(copy.__dlpack__())


def are_arrays(*parts: Any) -> bool:
    """Returns whether Keras takes inputs, targets and weights for arrays, of which it makes batches."""
    return bool(array_data_adapter.can_convert_arrays(parts))


class PyDatasetParts(NamedTuple):
    """What Keras' adapter for a `PyDataset` holds."""

    dataset: keras.utils.PyDataset
    shuffle: bool
    standardize: Callable[[Any], Any]


def py_dataset_parts(adapter: Any) -> PyDatasetParts | None:
    """Returns what Keras' adapter for a `PyDataset` holds, `None` for other adapters."""
    if not isinstance(adapter, PyDatasetAdapter):
        return None
    return PyDatasetParts(adapter.py_dataset, bool(adapter.shuffle), adapter._standardize_batch)


class IterableParts(NamedTuple):
    """What Keras' adapters for generators and loaders hold: how to iterate, and what is known of the batches."""

    batches: Callable[[], Iterable[Any]]
    known: dict[str, Any]


def iterable_parts(adapter: Any) -> IterableParts | None:
    """Returns what Keras' adapter for a generator or a torch `DataLoader` holds, `None` for other adapters."""
    if isinstance(adapter, GeneratorDataAdapter):
        first, batches, count = adapter._first_batches, adapter.generator, None
    elif isinstance(adapter, TorchDataLoaderAdapter):
        first, batches, count = (
            list(itertools.islice(adapter.get_numpy_iterator(), 2)),
            adapter.get_numpy_iterator,
            adapter.num_batches,
        )
    else:
        return None
    signature = data_adapter_utils.get_tensor_spec(first) if first else None
    known = {"signature": signature, "first": _with_tensors(first[0]) if first else None, "num_batches": count}
    known["is_single_pass"] = isinstance(adapter, GeneratorDataAdapter)  # a loader begins again
    return IterableParts(lambda: map(_with_tensors, batches()), known)


def _with_tensors(batch: Any) -> Any:
    """Returns a batch with TensorFlow's sparse tensors in the place of SciPy's and JAX', as Keras' adapter does."""

    def tensor(leaf: Any) -> Any:
        if data_adapter_utils.is_scipy_sparse(leaf):
            return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
        if data_adapter_utils.is_jax_sparse(leaf):
            return tf.sparse.reorder(data_adapter_utils.jax_sparse_to_tf_sparse(leaf))
        return leaf

    return keras.tree.map_structure(tensor, batch)


def tf_dataset(adapter: Any) -> tf.data.Dataset | None:
    """Returns the `tf.data.Dataset` in Keras' adapter, class weights applied; `None` for other adapters.

    Of a Grain dataset the adapter makes a new one at each call.
    """
    return adapter.get_tf_dataset() if isinstance(adapter, (TFDatasetAdapter, GrainDatasetAdapter)) else None
