"""Python in a graph: calls that run in the order of the program, whatever thread of TensorFlow's runs them."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist.engines.fusion import Array

Exchange = Callable[..., list[Array]]
"""Takes arrays and returns arrays."""


class InTurn:
    """Makes calls a part of the graph, in program order: branches and loops of it included.

    TensorFlow keeps the order of what has no variable among its inputs, and of what has the same; a branch that uses
    some variable of the model's is neither. So all calls use one.

    Args:
        name: str, the variable's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._of_thread = threading.local()

    def call(self, exchange: Exchange, tensors: Sequence[tf.Tensor], num_owned: int = 0) -> list[tf.Tensor]:
        """Calls `exchange` when the graph runs.

        Args:
            exchange: callable that takes the tensors' arrays, and returns as many of the same dtypes. The arrays may
                be TensorFlow's own memory, and TensorFlow may take over the results' memory: what comes in must not be
                written to, and what goes out not be used again.
            tensors: sequence of tensors.
            num_owned: int, how many of them, the first ones, may be written to and returned: 1-D tensors of numbers.

        Returns:
            A list of tensors, of unknown shapes.
        """
        turn = self._order.read_value()
        with tf.control_dependencies([turn]):
            owned = [_owned(tensor, place, turn) for place, tensor in enumerate(tensors[:num_owned])]
            tensors = [*owned, *tensors[num_owned:]]
            results = tf.numpy_function(
                functools.partial(self._run, exchange), tensors, [tensor.dtype for tensor in tensors], stateful=True
            )
        with tf.control_dependencies(results if tensors else [results]):
            self._order.assign(turn)
        return results

    @functools.cached_property
    def _order(self) -> tf.Variable:
        """What all calls read before and write after; made late, for engines come before GPUs."""
        with tf.init_scope(), tf.device("CPU:0"):
            # Lifted, it would pass for one of the function that is traced now, which would then be traced once more.
            return tf.Variable(0, trainable=False, name=self._name, experimental_enable_variable_lifting=False)

    def _run(self, exchange: Exchange, *arrays: Array) -> list[Array]:
        # To make anew what Python knows of this thread, which is TensorFlow's, costs a tenth of a message: one state a
        # thread stays until the process ends. For a thread of Python's own nothing changes.
        if not hasattr(self._of_thread, "stays"):
            self._of_thread.stays = True
            ctypes.pythonapi.PyGILState_Ensure()
        return exchange(*arrays)


def _owned(tensor: tf.Tensor, place: int, turn: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's values in memory that nothing else of the graph sees: its own, without a copy, if that is so.

    That is what a snapshot is of what nobody else holds. That it begins at 0 is known only when the graph runs: so
    TensorFlow does not make it once, as a constant, nor one for a tensor that is there twice, as their places differ.
    """
    return tf.raw_ops.Snapshot(input=tensor[(place + 2) * turn :])
