"""The part of each weight that a rank updates."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.arrays.fusion import part_bounds
from kdist.errors import StrategyError
from kdist.keras_hooks.layers.parts import Holder, PartVariable
from kdist.keras_hooks.optimizers import variable_like
from kdist.keras_hooks.patching import patch
from kdist.keras_hooks.variables import raw_variable

_ROWS_A_RANK = 8  # from which on whole rows are near-equal parts


@dataclasses.dataclass(frozen=True)
class Part:
    """This rank's rows of one weight, and a variable that shows them to an optimizer.

    The variable holds memory during an update only: the weight itself is whole on every rank.

    Attributes:
        weight: `keras.Variable` or `tf.Variable`.
        view: tuple of ints, the shape in which the weight is cut along the first axis: its own, or flat.
        lengths: tuple of ints, how many rows each rank has.
        start: int, the first row of this rank.
        stop: int, the row after its last.
        is_cut: bool, whether several ranks have rows; else one rank has all of them.
        variable: `keras.Variable` of this rank's rows.
    """

    weight: Any
    view: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int
    is_cut: bool
    variable: Any

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole weight."""
        raw = raw_variable(self.weight)
        return math.prod(self.view) * int(raw.dtype.size)

    def of(self, value: Any) -> Any:
        """Returns this rank's rows of a tensor or array of the weight's shape."""
        rows = tf.reshape(value, self.view)
        if not self.is_cut:  # no slices: TensorFlow 2.21's optimizer of graphs takes empty ones for others of them
            return _of_hidden_shape(rows) if self.stop else tf.zeros([0, *self.view[1:]], rows.dtype)
        return rows[self.start : self.stop]

    def of_slices(self, slices: tf.IndexedSlices) -> Any:
        """Returns this rank's rows of a sparse gradient, each reading of a row by itself."""
        if not self.is_cut:
            return slices if self.stop else tf.zeros([0, *self.view[1:]], slices.dtype)
        values, indices = slices.values, slices.indices
        if len(self.view) < len(self.weight.shape):  # flat
            width = math.prod(self.weight.shape[1:])
            indices = tf.reshape(indices[:, tf.newaxis] * width + tf.range(width, dtype=indices.dtype), [-1])
            values = tf.reshape(values, [-1])
        is_mine = (indices >= self.start) & (indices < self.stop)
        return tf.IndexedSlices(
            tf.boolean_mask(values, is_mine),
            tf.boolean_mask(indices, is_mine) - self.start,
            dense_shape=tf.constant([self.stop - self.start, *self.view[1:]], indices.dtype),
        )

    def load(self) -> None:
        """Sets the variable to the weight's rows."""
        self._set(self.of(raw_variable(self.weight)))

    def free(self) -> None:
        """Gives the variable's memory back."""
        nothing = tf.zeros([0], raw_variable(self.variable).dtype)
        self._set(tf.compat.v1.placeholder_with_default(nothing, shape=None))  # of a shape that graphs do not check

    def _set(self, value: Any) -> None:
        raw = raw_variable(self.variable)
        tf.raw_ops.AssignVariableOp(resource=raw.handle, value=value, validate_shape=False)


_IS_UPDATING = contextvars.ContextVar("kdist_is_updating_parts", default=False)


@contextlib.contextmanager
def parts_are_updated() -> Iterator[None]:
    """Lets an optimizer read its sharded slots, in this thread, while the context is open."""
    token = _IS_UPDATING.set(True)
    try:
        yield
    finally:
        _IS_UPDATING.reset(token)


class SlotPart(PartVariable):
    """A slot of which this rank holds its part, for the optimizer alone: a script that reads it wants all of it."""

    @property
    def value(self) -> Any:
        """This rank's part, in an update; else it raises `StrategyError`."""
        return super().value if _IS_UPDATING.get() else self.numpy()

    def numpy(self) -> Any:
        """Raises `StrategyError`."""
        raise StrategyError(
            f'This rank holds a part of this variable (shard="optimizer", shard_embeddings). Received: a read of '
            f"{self.path!r} on one rank. Expected a call that all ranks make, which gathers the parts. Fix: "
            "model.save(...), or `state = {}` and optimizer.save_own_variables(state), on all ranks."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()


def hold(slot: Any, holder: Holder) -> None:
    """Makes a slot, which has the shape of this rank's part, one whose whole value `holder` reads and sets."""
    patch(slot, "__class__", SlotPart)
    slot.kdist_holder = holder


def _of_hidden_shape(value: Any) -> Any:
    """Returns a tensor whose shape Python knows, and TensorFlow's optimizer of graphs does not.

    That of 2.21 replaces means over an axis of such a tensor by the tensor.
    """
    if not tf.is_symbolic_tensor(value):
        return value
    shape = tf.constant(value.shape.as_list(), tf.int32)
    hidden = tf.reshape(value, tf.compat.v1.placeholder_with_default(shape, shape.shape))
    hidden.set_shape(value.shape)
    return hidden


def make_parts(weights: Sequence[Any], size: int, rank: int, *, is_elementwise: bool) -> list[Part]:
    """Returns this rank's parts of weights.

    Args:
        weights: sequence of `keras.Variable` or `tf.Variable`.
        size: int, the number of ranks.
        rank: int, this rank.
        is_elementwise: bool, whether weights can be cut. Else each is whole at one rank, the one with the fewest bytes
            so far, largest weights first.

    Returns:
        A list of `Part`, in the order of the weights.
    """
    owners = {} if is_elementwise else _owners(weights, size)
    return [_part(weight, size, rank, owners.get(place)) for place, weight in enumerate(weights)]


def _part(weight: Any, size: int, rank: int, owner: int | None) -> Part:
    shape = tuple(weight.shape)
    view = shape if shape and (owner is not None or shape[0] >= _ROWS_A_RANK * size) else (math.prod(shape),)
    if owner is None:
        bounds = part_bounds(view[0], size)
        start, lengths = bounds[rank], tuple(stop - start for start, stop in itertools.pairwise(bounds))
    else:
        start, lengths = 0, tuple(view[0] * (each == owner) for each in range(size))
    variable = variable_like(weight, (lengths[rank], *view[1:]))
    part = Part(weight, view, lengths, start, start + lengths[rank], owner is None, variable)
    part.free()
    return part


def _owners(weights: Sequence[Any], size: int) -> dict[int, int]:
    num_bytes = [math.prod(weight.shape) * tf.as_dtype(weight.dtype).size for weight in weights]
    held, owners = [0] * size, {}
    for place in sorted(range(len(weights)), key=lambda place: -num_bytes[place]):
        owners[place] = held.index(min(held))
        held[owners[place]] += num_bytes[place]
    return owners
