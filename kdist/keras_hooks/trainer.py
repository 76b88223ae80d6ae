"""Keras' trainer and its models: methods, steps, layers, and the arguments of `compile`."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.random.seed_generator import global_seed_generator

from kdist.keras_hooks.patching import METHODS, patch, patched, watched
from kdist.keras_hooks.signatures import with_signature_of

Trainer = getattr(trainer_module, "TensorFlowTrainer", None) or trainer_module.Trainer  # Keras 3.16

# Methods of a model that have no public name.
MAKE_FUNCTION = "_make_function"
SYMBOLIC_BUILD = "_maybe_symbolic_build"
EPOCH_LOGS = "_get_metrics_result_or_logs"
CUSTOM_STEPS = "_kdist_custom_steps"  # of a model: the names of steps that its owner has set on the instance


def watch_models(
    made: Callable[[Any], None], used: Callable[[Any, str], None]
) -> contextlib.AbstractContextManager[None]:
    """Reports models that are made or used while the context is open; see `watched`."""
    return watched(Trainer, METHODS, made, used)


def watch_first_fit(is_reported: Callable[[Any], bool]) -> None:
    """Reports each `fit` of a model that kdist has not patched, until a report says that it was the last one.

    Args:
        is_reported: callable that takes the `callbacks` of a `fit` before it runs; returns whether it was the last one.
    """
    fit = Trainer.fit
    names = [*inspect.signature(fit).parameters]

    @functools.wraps(fit)
    def reported(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, (self, *args), strict=False)), **kwargs}  # a wrong call is left to Keras
        if "fit" not in vars(self) and is_reported(given.get("callbacks")):
            watching.close()
        return fit(self, *args, **kwargs)

    watching = contextlib.ExitStack()
    watching.enter_context(patched(Trainer, "fit", reported))


def patch_methods(model: keras.Model, wrappers: dict[str, Callable[..., Any]]) -> None:
    """Replaces a model's methods by wrappers with the same signatures, for the model's life; see `original`.

    A layer that is a trainer is no `keras.Model`, and has no `save`: methods that its class lacks are left out.
    """
    for name, wrapper in wrappers.items():
        if hasattr(type(model), name):
            patch(model, name, with_signature_of(getattr(type(model), name), wrapper))


def is_overridden(model: keras.Model, name: str) -> bool:
    """Returns whether a model's class overrides a method of the trainer, or its owner has set one on the instance."""
    return name in vars(model).get(CUSTOM_STEPS, ()) or getattr(type(model), name) is not getattr(Trainer, name)


def has_custom_steps(model: keras.Model) -> bool:
    """Returns whether a model overrides `train_step` or `test_step`."""
    return any(is_overridden(model, name) for name in ("train_step", "test_step"))


def computes_custom_loss(model: keras.Model) -> bool:
    """Returns whether a model overrides what calls its compiled loss."""
    return any(is_overridden(model, name) for name in ("train_step", "test_step", "compute_loss"))


def set_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Sets a model's `distribute_strategy`."""
    model._distribute_strategy = strategy


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns a model and all its layers, in a fixed order."""
    return list(model._flatten_layers())


def keeps_states(model: keras.Model) -> bool:
    """Returns whether a model has a stateful RNN, whose batch size is fixed."""
    return bool(_stateful_layers(model))


def keeps_states_of_one_row(model: keras.Model) -> bool:
    """Returns whether a stateful RNN is built for batches of one row: its loop must know that they have one."""
    states = [tf.nest.flatten(layer.states) for layer in _stateful_layers(model) if layer.built]
    return any(state[0].shape[0] == 1 for state in states)


def _stateful_layers(model: keras.Model) -> list[keras.layers.RNN]:
    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators of a model's layers, and Keras' global one, in a fixed order."""
    found = [generator for layer in layers_of(model) for generator in layer._seed_generators]
    # Keras makes the global one by a draw from Python's generator, whose state must not change for the user.
    before = random.getstate()
    found.append(global_seed_generator())
    random.setstate(before)
    return found


def compile_config(model: keras.Model) -> Any:
    """Returns an object that each `compile` replaces, `None` before the first."""
    return getattr(model, "_compile_config", None)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of `compile` by name, empty for a model that is not compiled."""
    config = compile_config(model)
    return {} if config is None else dict(config.config)


def runs_eagerly(model: keras.Model) -> bool:
    """Returns whether a model's steps run without a graph."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


def plain_compiles(model: keras.Model) -> bool:
    """Returns whether XLA would compile a model's steps without a strategy."""
    asked = compile_arguments(model).get("jit_compile", False)
    return any(each.device_type != "CPU" for each in tf.config.list_physical_devices()) if asked == "auto" else asked


def is_built(model: keras.Model) -> tuple[bool, bool]:
    """Returns whether a model's layers are built, and whether its compiled losses and metrics are."""
    compiled = [part for part in (model._compile_metrics, model._compile_loss) if part is not None]
    return all(layer.built for layer in layers_of(model)), all(part.built for part in compiled)


@contextlib.contextmanager
def tensor_names_kept() -> Iterator[None]:
    """Sets Keras' counter of the automatic names of symbolic tensors back: plain Keras makes none to build on."""
    counters = get_global_attribute("object_name_uids", collections.defaultdict(int), set_to_default=True)
    before = counters.get("keras_tensor", 0)
    try:
        yield
    finally:
        counters["keras_tensor"] = before
        if not before:
            del counters["keras_tensor"]


def build_layers(model: keras.Model, batch: Any) -> None:
    """Builds a model's layers on a batch; the tensors that they make are named as in plain Keras' first step."""
    inputs, *_ = keras.utils.unpack_x_y_sample_weight(batch)
    given = keras.tree.map_structure(
        lambda leaf: (
            None
            if leaf is None
            else keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype), name="x")
        ),
        inputs,
    )

    def call(inputs: Any) -> None:
        model(inputs, training=False)  # what is returned would be named

    compute_output_spec(call, given)


def build_eagerly(model: keras.Model, batch: Any) -> None:
    """Builds weights, losses and metrics by a call on a batch: NumPy in the user's code takes no symbolic tensors.

    The user's losses and metrics are not called.
    """
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    before = [(variable._value, tf.identity(variable._value)) for variable in model.variables]
    outputs = model(inputs, training=False)
    for variable, value in before:
        variable.assign(value)
    for part in (model._compile_metrics, model._compile_loss):
        if part is not None and not part.built and targets is not None:
            part.build(targets, outputs)
    if model.optimizer is not None and not model.optimizer.built and not has_custom_steps(model):
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Builds weights, losses and metrics from a batch, without running a step."""
    model._symbolic_build(data_batch=batch)


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the first epoch of the running `fit`, if a callback has set it."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the first epoch of the running `fit`; must be called in `on_train_begin`."""
    model._initial_epoch = epoch


def loss_tracker(model: keras.Model) -> keras.metrics.Mean | None:
    """Returns the metric in which Keras' steps count rows, or `None`."""
    return getattr(model, "_loss_tracker", None)


def is_output_loss(model: keras.Model, metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is that of the loss of one of a model's outputs, which Keras logs of several."""
    return any(metric is each for each in getattr(getattr(model, "_compile_loss", None), "metrics", []))
