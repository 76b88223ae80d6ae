"""Counts a model's weights and slots, without memory for those that are not there yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import UninitializedVariable
from kdist.errors import KDistError
from kdist.keras_hooks.layers.embedding import has_plain_lookup, refusal_reasons, table_of
from kdist.keras_hooks.optimizers import (
    copy_to_count,
    innermost,
    is_elementwise,
    optimizers_of,
    trained_variables,
    variable_like,
)
from kdist.keras_hooks.patching import original, patched
from kdist.keras_hooks.trainer import has_custom_steps, layers_of
from kdist.planning.activations import estimated_row
from kdist.planning.memory import TABLE_BYTES, Sizes
from kdist.sharding.refusals import can_update_parts, can_update_rows
from kdist.sharding.row_rules import whole_table_rules
from kdist.state.variables import sharded_slots

_LARGE = 2**20  # bytes; what is smaller gets its values, as counters do that are read


@contextlib.contextmanager
def unallocated() -> Iterator[None]:
    """Makes large variables without values while the context is open: they have a shape and take no memory."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        initial = kwargs.get("initial_value")
        if not callable(initial):
            return next_creator(**kwargs)
        try:
            spec = tf.function(initial).get_concrete_function().structured_outputs
            num_bytes = spec.shape.num_elements() * spec.dtype.size
        except Exception:  # an initializer that cannot be traced
            return next_creator(**kwargs)
        if num_bytes < _LARGE:
            return next_creator(**kwargs)
        return UninitializedVariable(
            shape=spec.shape, dtype=spec.dtype, trainable=kwargs.get("trainable"), name=kwargs.get("name")
        )

    with tf.variable_creator_scope(create):
        yield


def model_sizes(model: keras.Model, batch_size: int, inputs: Any = None, *, is_trained: bool = True) -> Sizes:
    """Returns the sizes of a model in one process, with activations estimated.

    Args:
        model: `keras.Model`, compiled if it is trained.
        batch_size: int, the rows of a step.
        inputs: nested `keras.KerasTensor`, the specs of its inputs; by default those that it was made with.
        is_trained: bool, whether there are gradients and slots.

    Raises:
        KDistError: if it is no model, it cannot be built, or is trained and was not compiled.
    """
    if not isinstance(model, keras.Model):
        raise KDistError(
            f"A plan is of a model. Received: {model!r}. Expected a keras.Model that is built and compiled. Fix: pass "
            "it, or plan a script by `kdist plan -np N SCRIPT`."
        )
    is_of_script = inputs is not None  # then steps are measured, too
    if inputs is None:
        inputs = getattr(model, "inputs", None) if model.built else None
        if inputs is None:
            raise KDistError(
                f"The model's inputs are not known. Received: {type(model).__name__} {model.name!r} without inputs. "
                "Expected a functional or sequential model with keras.Input. Fix: `kdist plan -np N SCRIPT`, which "
                "sees the data."
            )
        _check_lengths(model, inputs)
        inputs = inputs[0] if len(inputs) == 1 else inputs
    has_call = type(model).call is not keras.Model.call  # a GAN may have none: its steps call the models within it
    if has_call and not model.built:
        model(inputs)
    row = 0
    if has_call:
        try:
            row = estimated_row(model, inputs)
        except Exception as error:  # of NumPy in `call`, or a batch size that is fixed
            if not is_of_script:
                raise KDistError(
                    f"The model cannot be traced with two rows. Received: {type(model).__name__} {model.name!r}, and "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Expected a graph of "
                    "any number of rows. Fix: `kdist plan -np N SCRIPT`, which runs steps."
                ) from error
    if not is_trained:
        weights = sum(map(_bytes, model.variables))
        return Sizes(weights, trained=0, slots=0, row=row, batch_size=batch_size)
    if not getattr(model, "compiled", False):
        raise KDistError(
            f"The model is not compiled. Received: {type(model).__name__} {model.name!r}. Expected an optimizer. Fix: "
            "call model.compile() first."
        )
    trained = [_bytes(each) for each in model.trainable_variables]
    optimizers = [innermost(each) for each in _used_optimizers(model)]
    return Sizes(
        weights=sum(map(_bytes, model.variables)),
        trained=sum(trained),
        slots=slots(model),
        row=row,
        batch_size=batch_size,
        is_elementwise=all(map(is_elementwise, optimizers)),
        largest=max(trained, default=0),
        tables=_tables(model) if all(map(can_update_rows, optimizers)) else 0,
        takes_parts=all(can_update_parts(each, model.trainable_variables) for each in optimizers),
    )


def _check_lengths(model: keras.Model, inputs: Sequence[Any]) -> None:
    """Raises `KDistError` for inputs of open lengths, with which the sizes of activations are not known."""
    if any(length is None for each in keras.tree.flatten(inputs) for length in each.shape[1:]):
        raise KDistError(
            f"The sizes of the model's inputs are not known. Received: {type(model).__name__} {model.name!r} with "
            f"inputs of shape {', '.join(str(tuple(each.shape)) for each in keras.tree.flatten(inputs))}. Expected one "
            "length of each dimension but the first. Fix: `kdist plan -np N SCRIPT`, which sees the data."
        )


def _tables(model: keras.Model) -> int:
    """Returns the bytes of the trained tables that can be in parts."""
    layers = [each for each in layers_of(model) if isinstance(each, keras.layers.Embedding) and each.trainable]
    can_be = [each for each in layers if has_plain_lookup(each) and not whole_table_rules(each)]
    tables = {id(each.embeddings): each.embeddings for each in can_be if not refusal_reasons(each)}  # layers may share
    return sum(size for size in map(_bytes, tables.values()) if size >= TABLE_BYTES)


def slots(model: keras.Model) -> int:
    """Returns the bytes of the optimizers' states in one process. An optimizer that is not built is left so.

    Which weights are updated by one of several that are not built is not known: they count as one, the largest.

    Args:
        model: `keras.Model`, built and compiled.
    """
    optimizers = _used_optimizers(model)
    built = [each for each in optimizers if each.built]
    updated = {id(weight) for each in built for weight in trained_variables(innermost(each))}
    others = [weight for weight in model.trainable_variables if id(weight) not in updated]
    sizes = [
        _bytes_of_state(each)
        if sharded_slots(each) is None
        else _bytes_of_planned_state(each, trained_variables(innermost(each)))  # whole ones
        for each in built
    ]
    if others or not built:
        planned = [_bytes_of_planned_state(each, others) for each in optimizers if not each.built]
        sizes.append(max(planned, default=0))
    return sum(sizes)


def _bytes_of_planned_state(optimizer: keras.optimizers.Optimizer, weights: list[Any]) -> int:
    """Returns the bytes of the state that an optimizer has in one process for weights; it is left as it is."""
    try:
        copied = copy_to_count(optimizer)
        inner = innermost(copied)
        with unallocated(), patched(inner, "build", original(inner, "build")):  # also in a scope with slots in parts
            copied.build([each if table_of(each) is None else variable_like(each, each.shape) for each in weights])
    except Exception as error:
        name = type(optimizer).__name__
        raise KDistError(
            f"The optimizer's state cannot be counted: no copy of it can be made and built. Received: {name}, of which "
            f"that raises {error!r}. Expected one that `get_config` and `from_config` make again. Fix: return all "
            "arguments of `__init__` from its `get_config`, or build it before, by "
            "model.optimizer.build(model.trainable_variables)."
        ) from error
    return _bytes_of_state(copied)


def _used_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns a model's optimizers, without that of `compile` where its own steps have others."""
    found = optimizers_of(model)
    others = [each for each in found if each is not model.optimizer]
    is_default = type(model.optimizer) is keras.optimizers.RMSprop and not model.optimizer.built
    return others if others and is_default and has_custom_steps(model) else found


def _bytes_of_state(optimizer: keras.optimizers.Optimizer) -> int:
    return sum(map(_bytes, optimizer.variables))


def _bytes(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements()) * tf.as_dtype(variable.dtype).size
