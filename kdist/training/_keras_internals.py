"""The one file that imports `keras.src`: Keras' parts that have no public name, and the doors hung on them.

Nothing here is changed for good: what is replaced is put back when its context is left.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, data_adapter, data_adapter_utils
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.io_utils import print_msg
from keras.src.utils.python_utils import is_default

DataAdapter = data_adapter.DataAdapter
TFEpochIterator = tensorflow_trainer.TFEpochIterator
Trainer = tensorflow_trainer.TensorFlowTrainer

__all__ = [
    "DataAdapter",
    "EpochIterator",
    "GeneratorDataAdapter",
    "PyDatasetAdapter",
    "TFEpochIterator",
    "Trainer",
    "data_adapter_utils",
    "get_keras_mask",
    "print_msg",
]

VERBS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


@contextlib.contextmanager
def watch_models(made: Callable[[Any], None], used: Callable[[Any, str], None]) -> Iterator[None]:
    """Reports the models that are made, and those made elsewhere that are used, while the context is open.

    Keras tells a strategy of variables, never of models: so the constructor and the verbs of its trainer are
    wrapped, while a scope of several ranks is open and no longer.

    Args:
        made: callable, gets each model whose construction begins.
        used: callable, gets a model made elsewhere, and the verb's name, before one of the verbs (`fit`, ...) runs on
            it.
    """
    originals = {name: getattr(Trainer, name) for name in ("__init__", *VERBS)}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        originals["__init__"](self, *args, **kwargs)
        made(self)

    def verb(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name in self.__dict__:  # called by the model's own wrapper, or by a user's `super().fit(...)`
                return originals[name](self, *args, **kwargs)
            used(self, name)
            return getattr(self, name)(*args, **kwargs)

        return method

    Trainer.__init__ = init
    for name in VERBS:
        setattr(Trainer, name, verb(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Trainer, name, original)


@contextlib.contextmanager
def epoch_iterators(
    make: Callable[..., Any], strategy: tf.distribute.Strategy, *, is_chief: bool = True
) -> Iterator[None]:
    """Lets `fit`, `evaluate` and `predict` of models of one strategy take their data from `make`.

    Args:
        make: callable of Keras' data adapter for what the user gave, and of `steps_per_epoch` and
            `steps_per_execution` by name, that returns an iterator in the place of Keras' `TFEpochIterator`.
        strategy: the strategy whose models are meant; all others get Keras' own iterator.
        is_chief: bool, whether this process says what Keras' adapters warn of.
    """

    def dispatch(
        *args: Any,
        distribute_strategy: Any = None,
        steps_per_epoch: int | None = None,
        steps_per_execution: int = 1,
        **kwargs: Any,
    ) -> Any:
        if distribute_strategy is strategy:
            # Not for the chief: Python forgets in it what has been said once.
            with contextlib.nullcontext() if is_chief else warnings.catch_warnings():
                if not is_chief:
                    warnings.simplefilter("ignore")
                adapter = data_adapters.get_data_adapter(*args, steps_per_epoch=steps_per_epoch, **kwargs)
            return make(adapter, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution)
        return outer(
            *args,
            distribute_strategy=distribute_strategy,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
            **kwargs,
        )

    outer, tensorflow_trainer.TFEpochIterator = tensorflow_trainer.TFEpochIterator, dispatch
    try:
        yield
    finally:
        tensorflow_trainer.TFEpochIterator = outer


@contextlib.contextmanager
def callback_lists(make: Callable[..., Any], strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets `fit`, `evaluate` and `predict` of models of one strategy take their `CallbackList` from `make`.

    So a verb needs no argument of kdist's, and a model's own `fit(self, *args, **kwargs)` may pass on any it likes.

    Args:
        make: callable with the arguments of `keras.callbacks.CallbackList`, whose first may be such a list; it returns
            one, which the verb and the verbs within it then take as it is.
        strategy: the strategy whose models are meant; all others get Keras' own list.
    """
    plain = keras.callbacks.CallbackList
    made: list[keras.callbacks.CallbackList] = []

    class Door(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return any(instance is each for each in made)

        def __call__(cls, callbacks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if getattr(kwargs.get("model"), "distribute_strategy", None) is strategy:
                made.append(make(callbacks, *args, **kwargs))
                return made[-1]
            return callbacks if isinstance(callbacks, plain) else plain(callbacks, *args, **kwargs)

    outer = tensorflow_trainer.callbacks_module
    tensorflow_trainer.callbacks_module = types.SimpleNamespace(CallbackList=Door("CallbackList", (), {}))
    try:
        yield
    finally:
        tensorflow_trainer.callbacks_module = outer


def calling_list() -> keras.callbacks.CallbackList | None:
    """Returns the `CallbackList` that is calling one of its callbacks, `None` if there is none.

    A callback is told its model and its parameters, and nobody tells it of the others.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller
        frame = frame.f_back
    return None


def is_overridden(model: keras.Model, verb: str) -> bool:
    """Returns whether a model's class has a method of its own in the place of the trainer's."""
    return getattr(type(model), verb) is not getattr(Trainer, verb)


def has_own_steps(model: keras.Model) -> bool:
    """Returns whether a model's class has a training or test step of its own."""
    return any(getattr(type(model), name) is not getattr(Trainer, name) for name in ("train_step", "test_step"))


def set_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Gives a model, and the optimizers that it holds, to a strategy."""
    model._distribute_strategy = strategy


def set_optimizer_strategy(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Gives an optimizer to a strategy, and the one inside of it."""
    while optimizer is not None:
        optimizer._distribution_strategy = strategy
        optimizer = getattr(optimizer, "inner_optimizer", None)


def accumulates_plainly(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer only adds gradients up between its updates, and does all else with the sum."""
    kept = (
        *("apply", "apply_gradients", "_backend_apply_gradients"),
        *("_backend_increment_gradient_accumulators", "_backend_reset_gradient_accumulators"),
    )
    return (
        bool(optimizer.gradient_accumulation_steps)
        and optimizer.loss_scale_factor is None
        and not hasattr(optimizer, "inner_optimizer")
        and all(getattr(type(optimizer), name) is getattr(keras.optimizers.Optimizer, name) for name in kept)
    )


def accumulators(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any] | None = None
) -> list[tf.Variable | None]:
    """Returns where an optimizer adds up the gradients of variables, by default of all; empty before it is built."""
    if not optimizer.built:
        return []
    found = optimizer._accumulated_gradients
    if variables is not None:
        optimizer._check_variables_are_known(variables)
        found = [found[optimizer._get_variable_index(variable)] for variable in variables]
    return [None if each is None else each.value for each in found]


def is_update_due(optimizer: keras.optimizers.Optimizer, *, steps: int = 1) -> tf.Tensor:
    """Returns whether an accumulating optimizer updates in so many steps from here, a `bool` scalar."""
    return tf.equal((optimizer._iterations.value + steps) % optimizer.gradient_accumulation_steps, 0)


def is_called_each_step(callback: Any) -> bool:
    """Returns whether a callback has a method of its own that is called at each step of training."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    return not all(is_default(getattr(callback, name)) for name in names)


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators of a model's layers, and Keras' global one, in a fixed order."""
    found = [generator for layer in model._flatten_layers() for generator in layer._seed_generators]
    # Keras makes the global one when it is first drawn from. That takes a number from Python's generator, and must
    # not shift what the user's script draws later.
    before = random.getstate()
    found.append(global_seed_generator())
    random.setstate(before)
    return found


def state_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that a training step may write by itself: untrained weights of trainable layers."""
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if variable.dtype not in ("string",)
    ]


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns what the user gave to `compile`, by name; empty for a model that is not compiled."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None else dict(config.config)


@contextlib.contextmanager
def replaced_losses(model: keras.Model, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces each compiled loss by `wrap(loss)` while the context is open."""
    compile_loss = model._compile_loss
    if compile_loss is None:
        yield
        return
    entries = compile_loss._flat_losses
    build = compile_loss.build

    def replace() -> None:
        compile_loss._flat_losses = [entry._replace(loss=wrap(entry.loss)) for entry in entries]

    def build_and_replace(*args: Any, **kwargs: Any) -> None:
        nonlocal entries
        build(*args, **kwargs)
        entries = compile_loss._flat_losses
        replace()

    if entries:
        replace()
    compile_loss.__dict__["build"] = build_and_replace  # a loss may be built by the step that first needs it
    try:
        yield
    finally:
        del compile_loss.__dict__["build"]
        compile_loss._flat_losses = entries


@contextlib.contextmanager
def activities_scaled(model: keras.Model, scaled: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Applies a function to what Keras' own activity regularizers return, where that counts as a sum over the rows.

    Keras 3.14 and later divide by the number of rows, which is as good as a mean. What a regularizer of the user's own
    returns may be either.

    Args:
        model: `keras.Model`.
        scaled: function of a scalar that returns a scalar.
    """
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 14):
        yield
        return
    own = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    layers = [each for each in model._flatten_layers() if type(getattr(each, "activity_regularizer", None)) in own]
    regularizers = [layer.__dict__["activity_regularizer"] for layer in layers]

    def around(regularizer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda output: scaled(regularizer(output))

    for layer, regularizer in zip(layers, regularizers, strict=True):
        layer.__dict__["activity_regularizer"] = around(regularizer)
    try:
        yield
    finally:
        for layer, regularizer in zip(layers, regularizers, strict=True):
            layer.__dict__["activity_regularizer"] = regularizer


@contextlib.contextmanager
def noted_masks(loss: keras.losses.Loss) -> Iterator[list[Any]]:
    """Gives the list in which the mask of what a loss puts out before its reduction is noted: its `ignore_class`.

    Args:
        loss: `keras.losses.Loss`, called once while the context is open; `None` is noted where it has no such mask.
    """
    masks: list[Any] = []
    original, of_the_instance = loss.call, loss.__dict__.get("call")

    def call(*args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        masks.append(get_keras_mask(values))
        return values

    loss.__dict__["call"] = call
    try:
        yield masks
    finally:
        del loss.__dict__["call"]
        if of_the_instance is not None:
            loss.__dict__["call"] = of_the_instance


def unreduced(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits a loss with a mean-like reduction into what is summed and what it is divided by.

    Args:
        loss: a loss with `reduction` one of `"sum_over_batch_size"`, `"mean"`, `"mean_with_sample_weight"`.
        y_true: targets, as the loss takes them.
        y_pred: predictions, as the loss takes them; their Keras mask counts, and that of the loss's own.
        sample_weight: weights, as the loss takes them, or `None`.

    Returns:
        A tuple `(total, denominator)` of scalars: the loss is their quotient.
    """
    elementwise = copy.copy(loss)
    elementwise.reduction = "none"
    with noted_masks(elementwise) as masks:
        values = elementwise(y_true, y_pred, sample_weight)
    masks.append(get_keras_mask(y_pred))
    masks = [each for each in masks if each is not None]
    mask = functools.reduce(tf.logical_and, masks) if masks else None
    count = tf.cast(tf.size(values), values.dtype)
    if loss.reduction != "mean_with_sample_weight":
        if mask is not None:
            count *= tf.reduce_mean(tf.cast(mask, values.dtype))
    elif sample_weight is not None or mask is not None:
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight, values.dtype)
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
        weight = apply_mask(sample_weight, mask, dtype=values.dtype, reduction=loss.reduction)
        _, weight = squeeze_or_expand_to_same_rank(values, weight)
        count = tf.reduce_sum(tf.cast(weight, values.dtype))
    return tf.reduce_sum(values), count


def array_parts(adapter: Any) -> tuple[Any, int, int, bool | str] | None:
    """Takes Keras' adapter for arrays apart.

    Returns:
        `None` for other adapters, else a tuple `(inputs, num_samples, batch_size, shuffle)`: `inputs` is a structure of
        dense, sparse or ragged tensors, or `None` where the user gave nothing.
    """
    if not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return None

    def tensors(part: Any) -> Any:
        if isinstance(part, array_slicing.TensorflowSparseWrapper):  # a tuple itself: not to be looked into
            return part.sparse
        if isinstance(part, dict):
            return {key: tensors(value) for key, value in part.items()}
        if isinstance(part, (list, tuple)):
            return tuple(tensors(value) for value in part)  # tf.data takes a list for a tensor
        return part if part is None or isinstance(part, tf.RaggedTensor) else tf.convert_to_tensor(part)

    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    return tensors(inputs), adapter._num_samples, adapter._batch_size, adapter._shuffle


def is_built(model: keras.Model) -> tuple[bool, bool]:
    """Returns whether a model has all its weights, and whether its compiled losses and metrics are built."""
    compiled = [part for part in (model._compile_metrics, model._compile_loss) if part is not None]
    return all(layer.built for layer in model._flatten_layers()), all(part.built for part in compiled)


class PyDatasetParts(NamedTuple):
    """What Keras' adapter holds of a `PyDataset`."""

    dataset: keras.utils.PyDataset
    shuffle: bool
    standardize: Callable[[Any], Any]


def py_dataset_parts(adapter: Any) -> PyDatasetParts | None:
    """Takes Keras' adapter for a `PyDataset` apart; `None` for other adapters."""
    if not isinstance(adapter, PyDatasetAdapter):
        return None
    return PyDatasetParts(adapter.py_dataset, bool(adapter.shuffle), adapter._standardize_batch)


class IterableParts(NamedTuple):
    """What Keras' adapters hold of a generator or a loader: how to iterate, and what is known of the batches."""

    batches: Callable[[], Iterable[Any]]
    known: dict[str, Any]


def iterable_parts(adapter: Any) -> IterableParts | None:
    """Takes Keras' adapter for a generator or a torch `DataLoader` apart; `None` for other adapters."""
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
    return IterableParts(batches, {"signature": signature, "first": first[0] if first else None, "num_batches": count})


def tf_dataset(adapter: Any) -> tf.data.Dataset | None:
    """Returns the `tf.data.Dataset` in Keras' adapter, class weights applied; `None` for other adapters."""
    return adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
