"""Tensors that are kept from step to step, one for each of a model's variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf


class KeptState:
    """A tensor for each of a model's variables, kept from step to step, on this rank alone.

    Args:
        initial: callable that takes a shape and a dtype, and returns the first value of a tensor.
    """

    def __init__(self, initial: Callable[[Sequence[int], tf.DType], tf.Tensor]) -> None:
        self._initial = initial
        self._kept: dict[int, tuple[Any, tf.Variable]] = {}  # with the model's variable, whose id it is
        self._given: dict[int, npt.NDArray[Any]] = {}  # to what is not made yet

    @property
    def values(self) -> dict[int, tf.Variable]:
        """The tensors, by the ids of the model's variables."""
        return {key: each for key, (_, each) in self._kept.items()}

    def of(self, variable: Any, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Returns the tensor that is kept for a variable, made when it is first asked for."""
        if id(variable) not in self._kept:
            with tf.init_scope():
                # Lifted, it would pass for the function's own that is traced now, which would then be traced twice.
                made = tf.Variable(
                    self._first(id(variable), shape, dtype),
                    trainable=False,
                    experimental_enable_variable_lifting=False,
                )
            self._kept[id(variable)] = variable, made
        return self._kept[id(variable)][1]

    def give(self, arrays: Mapping[int, npt.NDArray[Any]]) -> None:
        """Gives the tensors values, those that are not made yet too; those for which there is none their first ones.

        Args:
            arrays: mapping of the ids of the model's variables to arrays.
        """
        self._given = dict(arrays)
        for key, each in self.values.items():
            each.assign(self._first(key, each.shape.as_list(), each.dtype))

    def _first(self, key: int, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        given = self._given.pop(key, None)
        if given is not None and (given.shape, given.dtype) == (tuple(shape), np.dtype(dtype.as_numpy_dtype)):
            return tf.constant(given)
        return self._initial(shape, dtype)


def by_place(kept: Mapping[str, Mapping[int, Any]], variables: Sequence[Any]) -> dict[str, Any]:
    """Returns what is kept for variables under names that another process knows too: a kind and a place in a list.

    Args:
        kept: mapping of kinds, each a mapping of the ids of variables to values.
        variables: sequence of variables; what is kept for others is left out.

    Example:
    >>> weight, bias = object(), object()
    >>> by_place({"residual": {id(bias): 0.5}}, [weight, bias])
    {'residual/1': 0.5}
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    return {
        f"{kind}/{places[key]}": value
        for kind, values in kept.items()
        for key, value in values.items()
        if key in places
    }


def by_variable(named: Mapping[str, Any], variables: Sequence[Any]) -> dict[str, dict[int, Any]]:
    """Undoes `by_place`, for as many variables as there are."""
    kept: dict[str, dict[int, Any]] = {}
    for name, value in named.items():
        kind, _, place = name.partition("/")
        if int(place) < len(variables):
            kept.setdefault(kind, {})[id(variables[int(place)])] = value
    return kept
