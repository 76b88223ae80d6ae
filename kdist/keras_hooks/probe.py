"""The private names of Keras that kdist uses, and those that the installed Keras does not have."""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist import keras_hooks
from kdist.keras_hooks.optimizers import UPDATE
from kdist.keras_hooks.patching import PATCHES, is_imported, resolved

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("_aggregate_additional_loss", "_compile_config", "_compile_loss", "_compile_metrics"),
        *("_distribute_strategy", "_flatten_layers", "_get_metrics_result_or_logs"),
        *("_initial_epoch", "_loss_tracker", "_make_function", "_maybe_symbolic_build"),
        *("_post_build", "_symbolic_build"),
    ),
    "layer": ("_flatten_layers", "_losses", "_non_trainable_variables", "_seed_generators"),
    "batch normalization": ("_moments", "_reduction_axes"),
    "compiled loss": ("_flat_losses",),
    "loss": ("_fn_kwargs", "fn"),
    "compiled metrics": ("_metrics",),
    "metric": ("_fn", "_fn_kwargs"),
    "optimizer": (
        *("_accumulated_gradients", "_apply_weight_decay", "_backend_apply_gradients", "_backend_update_step"),
        *("_clip_gradients", "_exclude_from_weight_decay", "_model_variables_moving_average", "_var_key"),
        "_backend_increment_gradient_accumulators",
        *("_backend_reset_gradient_accumulators", "_check_variables_are_known", "_distribution_strategy"),
        *("_get_current_learning_rate", "_get_variable_index", "_iterations", "_learning_rate"),
        *("_distributed_tf_update_step", "_trainable_variables", "_all_reduce_sum_gradients", "_clip_by_norm"),
        *("_filter_empty_gradients", "_overwrite_model_variables_with_average_value", "_use_weight_decay"),
        *("_overwrite_variables_directly_with_gradients", "_update_model_variables_moving_average"),
    ),
    "variable": (
        *("_direct_assign", "_export_to_saved_model_graph", "_path", "_restore_from_tensors", "_serialize_to_tensors"),
        *("_shape", "_value"),
    ),
    "embedding": ("_embeddings",),
    "value of a variable": ("_unique_id",),
    "saving": ("_save_state", "is_memory_sufficient", "safe_get_h5_dataset"),
    "HDF5 store": ("_create_h5_group", "_h5_entry_group", "_h5_entry_initialized", "_h5_entry_path"),
    "callback list": ("_async_predict", "_async_test", "_async_train"),
    "ModelCheckpoint": (
        *("_batches_seen_since_last_saving", "_get_file_path", "_last_batch_seen", "_save_model"),
        "_should_save_model",
    ),
    "BackupAndRestore": ("_load_model", "_save_model", "_weights_path"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
    "array adapter": ("_batch_size", "_inputs", "_num_samples", "_shuffle"),
    "PyDataset adapter": ("_standardize_batch",),
    "generator adapter": ("_first_batches",),
    "epoch iterator": (
        *("_current_iterator", "_distribute_strategy", "_enumerate_iterator"),
        *("_get_iterator", "_interrupted_warning", "_num_batches", "_steps_seen"),
    ),
}
"""The private names, by kind of object."""


def missing_names() -> list[str]:
    """Returns what the installed Keras does not have: imported names, private names, patched attributes."""
    missing = []
    for module in pkgutil.walk_packages(keras_hooks.__path__, f"{keras_hooks.__name__}."):
        try:
            importlib.import_module(module.name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{module.name}: {error}")
    for kind, names in PRIVATE_NAMES.items():
        try:
            sample = _SAMPLES[kind]()
        except Exception as error:  # a sample is made by Keras' own code, which may have changed in any way
            missing.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        missing += [f"{name} of {type(sample).__name__}" for name in names if not hasattr(sample, name)]
    if UPDATE not in _functions_in(keras.optimizers.Optimizer._distributed_tf_update_step):
        missing.append(f"{UPDATE} in Optimizer._distributed_tf_update_step")
    for patch in filter(is_imported, PATCHES):
        try:
            owner = resolved(patch.owner)
        except AttributeError:
            missing.append(patch.owner)
            continue
        missing += [f"{patch.owner}.{name}" for name in patch.names if not _has(owner, name)]
    return sorted(set(missing))


def _functions_in(function: Any) -> set[str]:
    """Returns the names of the functions that a function defines."""
    return {constant.co_name for constant in function.__code__.co_consts if isinstance(constant, CodeType)}


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    samples = [sample for sample in map(_made, _SAMPLES.values()) if isinstance(owner, type) and sample is not None]
    return any(isinstance(sample, owner) and hasattr(sample, name) for sample in samples)


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:
        return None


def _embedding() -> keras.layers.Embedding:
    layer = keras.layers.Embedding(2, 1)
    layer.build(())
    return layer


def _model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def _optimizer() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=2, use_ema=True)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([keras.Variable([0.0])])
    return optimizer


def _adapter(data: Any) -> Any:
    from keras.src.trainers.data_adapters import get_data_adapter

    return get_data_adapter(data)


def _epoch_iterator() -> Any:
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    return TFEpochIterator(x=np.zeros((2, 1)), batch_size=1, distribute_strategy=tf.distribute.get_strategy())


class _PyDataset(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return (np.zeros((1, 1)),)


_SAMPLES: Mapping[str, Callable[[], Any]] = {
    "model": _model,
    "layer": lambda: keras.layers.Dropout(0.5),
    "batch normalization": keras.layers.BatchNormalization,
    "embedding": _embedding,
    "compiled loss": lambda: _model()._compile_loss,
    "loss": keras.losses.MeanSquaredError,
    "compiled metrics": lambda: _model()._compile_metrics,
    "metric": keras.metrics.MeanSquaredError,
    "optimizer": _optimizer,
    "variable": lambda: keras.Variable([0.0]),
    "value of a variable": lambda: keras.Variable([0.0])._value,
    "saving": lambda: importlib.import_module("keras.src.saving.saving_lib"),
    "HDF5 store": lambda: importlib.import_module("keras.src.saving.saving_lib").H5IOStore(io.BytesIO(), mode="w"),
    "callback list": keras.callbacks.CallbackList,
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("probe.keras"),
    "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore("probe"),
    "CSVLogger": lambda: keras.callbacks.CSVLogger("probe"),
    "RemoteMonitor": keras.callbacks.RemoteMonitor,
    "SwapEMAWeights": keras.callbacks.SwapEMAWeights,
    "TensorBoard": keras.callbacks.TensorBoard,
    "array adapter": lambda: _adapter(np.zeros((2, 1))),
    "PyDataset adapter": lambda: _adapter(_PyDataset()),
    "generator adapter": lambda: _adapter((np.zeros((1, 1)),) for _ in range(2)),
    "epoch iterator": _epoch_iterator,
}
