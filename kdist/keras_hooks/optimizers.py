"""Keras' optimizers: those of a model, and their private state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.patching import original, patched
from kdist.keras_hooks.trainer import layers_of
from kdist.keras_hooks.variables import raw_variable

CURRENT_RATE = "_get_current_learning_rate"
APPLY_GRADIENTS = "_backend_apply_gradients"
CLIP = "_clip_gradients"
DECAY = "_apply_weight_decay"
TRAINED = "_trainable_variables"
UPDATE_AVERAGES, AVERAGES = "_update_model_variables_moving_average", "_model_variables_moving_average"
UPDATE = "apply_grad_to_update_var"  # a function in Keras' code, by whose name a strategy knows an optimizer's update

ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
_OF_A_WEIGHT = ("assign", "assign_add", "assign_sub", "_use_weight_decay")  # what an update calls for each weight
_OF_WEIGHTS = (
    *("apply", "apply_gradients", APPLY_GRADIENTS, "_backend_update_step", "_distributed_tf_update_step"),
    *(CLIP, "_clip_by_norm", "_apply_weight_decay", "_filter_empty_gradients", "_all_reduce_sum_gradients"),
    *(UPDATE_AVERAGES, "_overwrite_model_variables_with_average_value"),
    *("_backend_increment_gradient_accumulators", "_backend_reset_gradient_accumulators"),
    "_overwrite_variables_directly_with_gradients",
)
_STATE = ("finalize_variable_values", "load_own_variables", "save_own_variables")


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers in a model's attributes, the compiled one too, each once, in a fixed order."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    visited: set[int] = set()  # a list may contain itself
    of_every_layer = _names_of_keras()

    def visit(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, keras.optimizers.Optimizer):
                found.setdefault(id(value), value)
            elif isinstance(value, (list, tuple, dict)) and id(value) not in visited:
                visited.add(id(value))
                visit(value.values() if isinstance(value, dict) else value)

    for layer in layers_of(model):
        visit([value for name, value in vars(layer).items() if name not in of_every_layer])
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in found.values()}
    return [optimizer for key, optimizer in found.items() if key not in inner]


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Returns the attributes that each layer has: their long lists hold no optimizer."""
    return frozenset(vars(keras.layers.Layer(name="bare")))


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that holds the learning rate: the inner one of a `LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def is_learning_rate(variable: Any, optimizers: Sequence[keras.optimizers.Optimizer]) -> bool:
    """Returns whether a variable is a learning rate, which votes synchronise."""
    holders = [innermost(optimizer) for optimizer in optimizers]
    holders += [part for holder in holders for part in getattr(holder, "optimizers", ())]  # a `MultiOptimizer`
    return any(variable is stored_learning_rate(holder) for holder in holders)


def set_optimizer_strategy(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Sets the strategy of an optimizer and of its inner optimizer."""
    while optimizer is not None:
        optimizer._distribution_strategy = strategy
        optimizer = getattr(optimizer, "inner_optimizer", None)


def accumulates_as_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer accumulates gradients by Keras' methods, and does nothing else between updates."""
    names = (
        *("apply", "apply_gradients", "_backend_apply_gradients"),
        *("_backend_increment_gradient_accumulators", "_backend_reset_gradient_accumulators"),
    )
    return (
        bool(optimizer.gradient_accumulation_steps)
        and optimizer.loss_scale_factor is None
        and not hasattr(optimizer, "inner_optimizer")
        and all(getattr(type(optimizer), name) is getattr(keras.optimizers.Optimizer, name) for name in names)
    )


def accumulators(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any] | None = None
) -> list[tf.Variable | None]:
    """Returns the accumulators of variables, by default of all; empty before the optimizer is built."""
    if not optimizer.built:
        return []
    found = optimizer._accumulated_gradients
    if variables is not None:
        optimizer._check_variables_are_known(variables)
        found = [found[optimizer._get_variable_index(variable)] for variable in variables]
    return [None if each is None else each.value for each in found]


def is_update_due(optimizer: keras.optimizers.Optimizer, *, steps: int = 1) -> tf.Tensor:
    """Returns whether an accumulating optimizer updates in `steps` steps, a `bool` scalar."""
    return tf.equal((iterations(optimizer).value + steps) % optimizer.gradient_accumulation_steps, 0)


def stored_learning_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns an innermost optimizer's stored rate: a `keras.Variable`, a schedule, or a function."""
    return getattr(optimizer, "_learning_rate", None)


def current_learning_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the rate that an optimizer's class reads for an update, without patches of the instance."""
    return type(optimizer)._get_current_learning_rate(optimizer)


def iterations(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the variable that counts an optimizer's steps; `optimizer.iterations` counts updates."""
    return optimizer._iterations


def copy_to_count(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns an optimizer that is not built, with the settings of another one and a constant learning rate.

    Keras makes no schedule or function of a script's from its config, and no class of one within a loss scale.
    """
    inner = innermost(optimizer)
    holders = [inner, *getattr(inner, "optimizers", ())]  # of a `MultiOptimizer`
    with contextlib.ExitStack() as stack:
        for each in holders:
            stack.enter_context(patched(each, "_learning_rate", 0.5))
        config = optimizer.get_config()
    with keras.saving.custom_object_scope({type(each).__name__: type(each) for each in holders}):
        return type(optimizer).from_config(config)


@contextlib.contextmanager
def not_built(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Leaves optimizers unbuilt while the context is open."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(patched(optimizer, "build", lambda variables: None))
        yield


@contextlib.contextmanager
def built_outside_of_graphs(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Makes slots eagerly while the context is open: in a graph, TensorFlow takes a ps' variable for the chief's."""

    def build(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
        with tf.init_scope():
            original(optimizer, "build")(variables)

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(patched(optimizer, "build", functools.partial(build, optimizer)))
        yield


def count_ended_step(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Makes what needs no data of an update: weight decay, and the count.

    A graph of plain Keras that finds the end of its data has made these. An update that waits for its gradients (a loss
    scale, accumulation) or for others has not.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: list of those that the step updates.
    """
    waits = any(hasattr(optimizer, name) for name in ("inner_optimizer", "optimizers"))
    if waits or optimizer.gradient_accumulation_steps or not optimizer.built or not int(optimizer.iterations):
        return
    optimizer._apply_weight_decay(variables)
    optimizer._iterations.assign_add(1)


def trained_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an innermost optimizer was built with, empty before."""
    return getattr(optimizer, "_trainable_variables", None) or []


def momentum_of(optimizer: keras.optimizers.SGD, variable: Any) -> keras.Variable:
    """Returns SGD's velocity of a variable."""
    return optimizer.momentums[optimizer._get_variable_index(variable)]


# For optimizers whose slots are parts.


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer updates each number of a weight by itself."""
    owner = _rule_of(optimizer)
    return _is_of_keras(owner) and owner.__name__ in ELEMENTWISE and not _own(optimizer, _OF_A_WEIGHT)


def own_update_methods(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the methods that a user's class overrides and that see several weights, or the state."""
    return _own(optimizer, _OF_WEIGHTS + _STATE)


def _own(optimizer: keras.optimizers.Optimizer, names: Sequence[str]) -> list[str]:
    classes = [each for each in type(optimizer).__mro__ if not _is_of_keras(each)]
    return [name for name in names if any(name in vars(each) for each in classes)]


def shared_variables(optimizer: keras.optimizers.Optimizer, slots: Sequence[Any]) -> list[Any]:
    """Returns the variables that a user's own `update_step` may write and that are no slots."""
    if _is_of_keras(_rule_of(optimizer)):
        return []
    own = {id(each) for each in (*slots, optimizer.iterations, iterations(optimizer), stored_learning_rate(optimizer))}
    return [each for each in optimizer.variables if id(each) not in own]


def _rule_of(optimizer: keras.optimizers.Optimizer) -> type:
    return next(each for each in type(optimizer).__mro__ if "update_step" in vars(each))


def _is_of_keras(owner: type) -> bool:
    return owner.__module__.partition(".")[0] == "keras"


def variable_like(variable: Any, shape: Sequence[int]) -> keras.Variable:
    """Returns a variable of zeros that an optimizer takes for another one: of its dtype, names and path."""
    scope, _, base = raw_variable(variable).name.partition(":")[0].rpartition("/")
    name = variable.name if isinstance(variable, keras.Variable) else base
    with tf.name_scope(f"{scope}/" if scope else ""):  # weight decay looks for names in that of TensorFlow's variable
        made = keras.Variable("zeros", shape=tuple(shape), dtype=variable.dtype, trainable=False, name=name)
    made._path = getattr(variable, "path", name)
    return made


def exclude_alike(optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Excludes from weight decay the second variable of each pair whose first one is excluded."""
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    excluded |= {optimizer._var_key(other) for one, other in pairs if optimizer._var_key(one) in excluded}


def recorded_slots(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Builds an optimizer with variables, and returns each slot with its variable."""
    current: Any = None
    slots: list[tuple[Any, Any]] = []

    class Followed(list[Any]):
        def __iter__(self) -> Iterator[Any]:  # Keras makes slots in loops over the variables
            nonlocal current
            for current in super().__iter__():  # noqa: UP028  # `yield from` would not set it
                yield current
            current = None

    add_variable = optimizer.add_variable

    def add_and_record(*args: Any, **kwargs: Any) -> Any:
        made = add_variable(*args, **kwargs)
        if current is not None:
            slots.append((made, current))
        return made

    with patched(optimizer, "add_variable", add_and_record):
        original(optimizer, "build")(Followed(variables))
    return slots


def set_trained_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Sets the variables that an optimizer says it was built with."""
    vars(optimizer)[TRAINED] = list(variables)


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[tuple[Any, Any]]:
    """Returns each trained variable with the slot of its moving average, or `None`."""
    return list(zip(trained_variables(optimizer), getattr(optimizer, AVERAGES), strict=True))
