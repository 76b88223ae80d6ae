"""What state in parts does not support, told before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from kdist.errors import StrategyError
from kdist.keras_hooks.optimizers import ELEMENTWISE, is_elementwise, own_update_methods, shared_variables
from kdist.keras_hooks.variables import path_of
from kdist.sharding.table import tables_of

_NO_GRADIENT = "creates a resource in its body"  # what TensorFlow says of a gradient of a loop or a branch


def can_update_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an innermost optimizer can update rows of a table by themselves."""
    is_of_several = hasattr(optimizer, "optimizers")
    return not is_of_several and is_elementwise(optimizer) and not own_update_methods(optimizer)


def check_table_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises for an optimizer that cannot update rows of a table by themselves."""
    name = type(optimizer).__name__
    if not can_update_rows(optimizer):
        raise StrategyError(
            f"shard_embeddings does not support this optimizer, which may need all rows of a table at once. Received: "
            f"{name}. Expected one of Keras' that update each number by itself: {', '.join(ELEMENTWISE)}. Fix: use one "
            "of these as it is, or a larger number for shard_embeddings."
        )


@contextlib.contextmanager
def lookups_in_loops_refused(model: keras.Model) -> Iterator[None]:
    """Says of a gradient that TensorFlow cannot take through a loop that it is of a lookup in a table in parts."""
    try:
        yield
    except ValueError as error:
        if _NO_GRADIENT not in str(error) or not tables_of(model):
            raise
        raise StrategyError(
            "A table in parts is looked up in a loop or a branch of the graph, through which TensorFlow takes no "
            f"gradient of it (shard_embeddings). Received: a lookup at {str(error).rpartition(': ')[2]}. Expected "
            "lookups outside of keras.layers.RNN cells, tf.while_loop and tf.cond. Fix: look the ids up before the "
            "loop, RNN(cell, unroll=True), or a larger number for shard_embeddings."
        ) from error


def can_update_parts(optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]) -> bool:
    """Returns whether an innermost optimizer can update parts of weights, if it is made in the scope."""
    try:
        _check_methods(optimizer)
        check_weights(optimizer, weights)
    except StrategyError:
        return False
    return True


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises for an optimizer that cannot update parts of weights."""
    _check_methods(optimizer)
    if optimizer.built:
        raise StrategyError(
            f'shard="optimizer" does not support an optimizer that is built outside of the scope: its slots are whole. '
            f"Received: a {type(optimizer).__name__} that is built. Expected one that is made, or loaded with its "
            "model, in kdist.scope(). Fix: move the line that makes it into the scope."
        )


def _check_methods(optimizer: keras.optimizers.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise StrategyError(
            f'shard="optimizer" does not support an optimizer of several. Received: a {name}. Expected one optimizer '
            "for each set of weights. Fix: use one optimizer, several in a train_step of the model's own, or "
            'kdist.AllReduce() without shard="optimizer".'
        )
    if methods := own_update_methods(optimizer):
        raise StrategyError(
            f'shard="optimizer" does not support this optimizer: these methods would see parts. Received: '
            f"{name} with its own {', '.join(methods)}. Expected one that overrides what is called for one weight, as "
            '`update_step`. Fix: move the rule to `update_step`, or use kdist.AllReduce() without shard="optimizer".'
        )


def check_weights(optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]) -> None:
    """Raises for weights that cannot be updated in parts."""
    scales = [path_of(weight) for weight in weights if getattr(weight, "overwrite_with_gradient", False)]
    if scales:
        raise StrategyError(
            f'shard="optimizer" does not support float8. Received: {type(optimizer).__name__} with the scale '
            f"{scales[0]!r}. Expected weights that the optimizer updates. Fix: remove the float8 quantization, or use "
            'kdist.AllReduce() without shard="optimizer".'
        )
    lasting = [path_of(weight) for weight in weights if _word(weight) == "on_read"]
    if lasting:
        raise StrategyError(
            f'shard="optimizer" does not support weights that each rank keeps for itself. Received: {lasting[0]!r}, '
            'a trainable weight with synchronization="on_read". Expected weights that are equal on all ranks. Fix: '
            'remove the synchronization, or use kdist.AllReduce() without shard="optimizer".'
        )


def check_shared_variables(optimizer: keras.optimizers.Optimizer, slots: Sequence[Any]) -> None:
    """Raises for variables that a rule updates for all weights, of which each rank updates some.

    Args:
        optimizer: a built one.
        slots: sequence of the optimizer's variables that belong to one weight each.
    """
    if found := shared_variables(optimizer, slots):
        raise StrategyError(
            f'shard="optimizer" does not support an `update_step` with state that all weights share. Received: '
            f"{type(optimizer).__name__} with {path_of(found[0])!r}. Expected variables of one weight each, made in a "
            "loop over the weights in `build`. Fix: keep one for each weight, or use kdist.AllReduce() without "
            'shard="optimizer".'
        )


def _word(weight: Any) -> str:
    choice = getattr(weight, "synchronization", "auto")
    return str(choice if isinstance(choice, str) else choice.name.lower())
