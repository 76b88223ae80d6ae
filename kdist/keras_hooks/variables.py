"""Keras' variables: their tensors, and the methods that write them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._tf_internals import ASSIGNMENTS, SCATTERS, BaseResourceVariable, ResourceVariable
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import layers_of

DIRECT_ASSIGN = "_direct_assign"
VALUE = "_value"


def value_of(variable: keras.Variable) -> Any:
    """Returns a variable's `tf.Variable`, or the tensor that replaces it while a step is traced."""
    return variable._value


@contextlib.contextmanager
def recorded_assignments(record: Callable[[Any, str, list[Any]], tf.Tensor | None]) -> Iterator[None]:
    """Calls a function before each assignment that this thread makes to any variable while the context is open.

    Args:
        record: callable that takes the `keras.Variable`, or the `tf.Variable` that is assigned to by itself, the name
            of the method, the tensors, arrays and numbers among its arguments. It returns what is to be assigned in the
            place of the first argument, or, for a method that writes some rows, the whole new value; or `None`.
    """
    thread, is_recording = threading.get_ident(), False

    def recording(write: Callable[..., Any], name: str) -> Callable[..., Any]:
        def record_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_recording
            if is_recording or threading.get_ident() != thread:
                return write(self, *args, **kwargs)
            is_recording = True
            try:
                value = record(self, name, _values_in([*args, *(kwargs[each] for each in sorted(kwargs))]))
                if value is None:
                    return write(self, *args, **kwargs)
                if name in SCATTERS:
                    return self.assign(value)
                others = {key: each for key, each in kwargs.items() if key not in ("value", "delta")}
                return write(self, value, *args[1:], **others)
            finally:
                is_recording = False

        converted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(record_and_write)
        return converted

    writers = {
        keras.Variable: (DIRECT_ASSIGN,),
        ResourceVariable: ASSIGNMENTS,
        BaseResourceVariable: ASSIGNMENTS + SCATTERS,
    }
    with contextlib.ExitStack() as stack:
        for owner, names in writers.items():
            for name in names:
                stack.enter_context(patched(owner, name, recording(getattr(owner, name), name)))
        yield


def _values_in(arguments: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for argument in arguments:
        parts = [
            tf.convert_to_tensor(each) if isinstance(each, (keras.Variable, tf.Variable)) else each
            for each in tf.nest.flatten(argument)
        ]
        if isinstance(argument, (list, tuple)) and all(isinstance(part, (int, float)) for part in parts):
            found.append(np.asarray(argument))  # of indices, the shape counts
            continue
        numbers = (int, float, np.number, np.ndarray)
        parts = tf.nest.flatten(parts, expand_composites=True)
        found += [part for part in parts if tf.is_tensor(part) or (isinstance(part, numbers) and part is not True)]
    return found


def aggregation_of(variable: Any) -> str:
    """Returns the `aggregation` of a `keras.Variable` or a `tf.Variable` by Keras' names."""
    return _word(variable.aggregation)


def _word(choice: Any) -> str:
    return choice if isinstance(choice, str) else choice.name.lower()


def path_of(variable: Any) -> str:
    """Returns the name by which a user knows a variable."""
    return variable.path if isinstance(variable, keras.Variable) else variable.name.removesuffix(":0")


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a `SeedGenerator`, of a model or of no object that Keras tracks."""
    return isinstance(variable, keras.Variable) and variable.name == "seed_generator_state"


def is_declared_of_one_rank(variable: Any) -> bool:
    """Returns whether a variable is synchronised when it is read, without an aggregation: each rank has its own."""
    return _word(variable.synchronization) == "on_read" and aggregation_of(variable) == "none"


def is_of_one_rank(model: keras.Model, variable: Any) -> bool:
    """Returns whether each rank keeps its own value on purpose.

    That of a variable for which it is declared, and the states of a stateful RNN, which belong to the rank's rows.
    """
    if is_declared_of_one_rank(variable):
        return True
    states = [each.states for each in layers_of(model) if isinstance(each, keras.layers.RNN) and each.stateful]
    return any(variable is state for state in keras.tree.flatten(states))


def statistics_of_keras(model: keras.Model) -> set[int]:
    """Returns the keys of Keras' own moving statistics, which are averaged."""
    layers = [each for each in layers_of(model) if isinstance(each, keras.layers.BatchNormalization)]
    return {key_of(each) for layer in layers for each in layer._non_trainable_variables}


def raw_variable(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a `keras.Variable`; other variables are returned."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def number_of(variable: Any) -> float:
    """Returns the number in a variable of no dimensions, or in what is one."""
    return float(tf.convert_to_tensor(variable))  # a mirrored variable has no float()


def key_of(variable: Any) -> int:
    """Returns the id of a variable's handle, which all objects for one variable share."""
    return id(raw_variable(variable).handle)
