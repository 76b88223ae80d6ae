"""Python functions in a graph, called in program order by whichever of TensorFlow's threads runs them."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist.engines.arrays.fusion import Array
from kdist.engines.tensors.unlifted import unlifted_variable

LARGE_BYTES = 1 << 20
"""From this size of what a call takes on, memory is given back before: that costs some microseconds."""

Exchange = Callable[..., list[Array]]
"""Takes arrays and returns arrays."""


class OrderedCalls:
    """Adds calls of Python functions to a graph, in program order, in its branches and loops too.

    TensorFlow orders stateful operations without a variable among their inputs, and those with the same variable; a
    branch that uses a variable of the model is neither. So all calls read and write one variable of their own.

    Args:
        name: str, the variable's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._of_thread = threading.local()

    def call(
        self,
        exchange: Exchange,
        tensors: Sequence[tf.Tensor],
        num_owned: int = 0,
        dtypes: Sequence[tf.DType] | None = None,
    ) -> list[tf.Tensor]:
        """Calls `exchange` when the graph runs.

        Args:
            exchange: callable that takes the tensors' arrays, and returns arrays. What it takes may be TensorFlow's
                own memory, and TensorFlow may use the memory of what it returns: it must not write to the former, nor
                use the latter again.
            tensors: sequence of tensors.
            num_owned: int, how many of them, the first ones, may be written to and returned: 1-D tensors of numbers.
            dtypes: sequence of dtypes of the results; by default those of `tensors`.

        Returns:
            A list of tensors, of unknown shapes.
        """
        dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
        turn = self._order.read_value()
        with tf.control_dependencies([turn]):
            owned = [_owned(tensor, place, turn) for place, tensor in enumerate(tensors[:num_owned])]
            inputs = [*owned, *tensors[num_owned:]]
            results = tf.numpy_function(functools.partial(self._run, exchange), inputs, dtypes, stateful=True)
        with tf.control_dependencies(results if dtypes else [results]):
            self._order.assign(turn)
        return results if dtypes else []

    @functools.cached_property
    def _order(self) -> tf.Variable:
        """What all calls read before and write after; made at the first call, for engines are made before GPUs."""
        with tf.init_scope(), tf.device("CPU:0"):
            return unlifted_variable(0, self._name)

    def _run(self, exchange: Exchange, *arrays: Array) -> list[Array]:
        # Python's state for a thread of TensorFlow's is made at each call, which costs a tenth of a message. With this
        # it is kept until the process ends. For a thread of Python's own nothing changes.
        if not hasattr(self._of_thread, "stays"):
            self._of_thread.stays = True
            ctypes.pythonapi.PyGILState_Ensure()
        if sum(array.nbytes for array in arrays) >= LARGE_BYTES:
            # TensorFlow keeps arrays of former results, which nothing uses any more, until it makes an eager tensor.
            tf.constant(0)
        return exchange(*arrays)


def _owned(tensor: tf.Tensor, place: int, turn: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's values in memory that no other operation of the graph uses, without a copy where possible.

    A snapshot copies only if the memory is shared. The slice begins at 0, which is known only when the graph runs: so
    TensorFlow neither folds the snapshot into a constant, nor merges those of a tensor that is sent twice.
    """
    return tf.raw_ops.Snapshot(input=tensor[(place + 2) * turn :])
