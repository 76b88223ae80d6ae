"""An embedding table of which each rank holds the rows `r` with `r % size == rank`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.trainer import layers_of
from kdist.keras_hooks.variables import raw_variable
from kdist.sharding.blocks import checksum, row_blocks, sent_to
from kdist.state.part import BLOCK
from kdist.strategies.all_reduce import AllReduceStrategy


class Table:
    """The rows of one `Embedding` layer; see `TableVariable` for what a script sees.

    Args:
        strategy: `AllReduceStrategy`.
        shape: pair of ints, the number of all rows and their length.
        rows: `keras.Variable`, this rank's rows.
        regularizer: callable or `None`; the penalty of all rows is the sum of those of each rank's.
        sign: JSON value that tells the initial values of all rows from others.

    Attributes:
        engine: `Engine`, of all ranks.
        loads: pair, how many values were assigned, to slots too, and a checksum of the last ones of the table.
    """

    def __init__(
        self,
        strategy: AllReduceStrategy,
        shape: tuple[int, int],
        rows: keras.Variable,
        regularizer: Callable[[Any], Any] | None = None,
        sign: Any = None,
    ) -> None:
        self._strategy = strategy
        self.engine = strategy.engine
        self._shape = shape
        self.rows = rows
        self._regularizer = regularizer
        self._has_slope = False
        self._sign = sign
        self.loads: tuple[int, int | None] = 0, None

    # The table itself, and slots of its shape; see `Holder`.

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of all rows."""
        return list(self._shape)

    def whole(self, variable: Any) -> Any:
        """Returns all rows, an array.

        Collective: every rank must call this, in the same order.
        """
        found = np.empty(self._shape, raw_variable(variable).dtype.as_numpy_dtype)
        for start, block in self.blocks(variable, list(range(self.engine.size))):
            found[start : start + len(block)] = block
        return found

    def blocks(self, variable: Any, receivers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yields blocks of all rows; see `Holder`.

        Collective: every rank must iterate over this, in the same order.
        """
        engine, (number, width), raw = self.engine, self._shape, raw_variable(variable)
        step = max(1, BLOCK // (width * raw.dtype.size * engine.size))  # rows of a rank
        for first in range(0, num_rows(number, engine.size, 0), step):
            start, stop = first * engine.size, min(number, (first + step) * engine.size)
            received = sent_to(receivers, self._rows(variable, first, first + step), engine)
            block = np.empty((stop - start if engine.rank in receivers else 0, width), received.dtype)
            for rank in range(engine.size) if len(block) else ():
                rows = num_rows(stop - start, engine.size, rank)
                block[rank :: engine.size], received = received[:rows], received[rows:]
            yield start, block

    def _rows(self, variable: Any, start: int, stop: int) -> Any:
        raw = raw_variable(variable)
        if table_of(variable) is None:
            return raw[start:stop]
        # A lookup has read rows of it: each read of all would be a copy.
        return raw.sparse_read(tf.range(start, min(stop, raw.shape[0])))

    def assign(self, variable: Any, array: Any) -> None:
        """Sets this rank's rows to those of an array; see `row_blocks`."""
        if tuple(array.shape) != self._shape:
            raise ValueError(
                f"The shape of the value is not that of the table. Received: a value of shape {tuple(array.shape)} for "
                f"{self.rows.path!r}. Expected the shape of all rows, {self._shape}. Fix: assign all rows, or load a "
                "file of the same model."
            )
        size, rank, raw = self.engine.size, self.engine.rank, raw_variable(variable)
        first, number, found = 0, self.loads[0] + 1, 0
        for start, block in row_blocks(array):
            values = tf.cast(block[(rank - start) % size :: size], raw.dtype)  # HDF5 is slow in reading every other row
            stop = first + values.shape[0]
            # In place: what is assigned to a variable of which rows were read is copied.
            raw.scatter_update(tf.IndexedSlices(values, tf.range(first, stop)))
            first = stop
            if not tf.is_symbolic_tensor(block):
                found = checksum(block, raw.dtype, found)
        self.loads = number, found if table_of(variable) is self else self.loads[1]

    def values(self) -> dict[str, Any]:
        """Returns where the values come from, by name, for a comparison."""
        path, (number, found) = self.rows.path, self.loads
        signs = {f"initial values of {path}": self._sign} if found is None else {f"checksum of values of {path}": found}
        return {f"values assigned to {path}": number, **signs}

    def refuse(self) -> NoReturn:
        """Raises `StrategyError`."""
        raise StrategyError(
            f"A layer's table is used as a whole, and each rank holds some of its rows (shard_embeddings). Received: "
            f"{self.rows.path!r} in an operation, as in a model whose output layer has the weights of its embedding. "
            "Expected lookups by calling the layer. Fix: call the layer, use a weight of its own there, or a larger "
            "number for shard_embeddings. model.get_weights() on all ranks returns all rows."
        )

    # Lookups and gradients.

    def look_up(self, ids: Any, name: str) -> Any:
        """Returns the rows of some ids, each sent once by the rank that holds it.

        Collective: every rank must call this, in the same order. The gradient of the table has the ids of this rank.

        Args:
            ids: integer tensor of any shape; negative ones count from the end.
            name: str, the layer's name.
        """
        engine = self._engine_of_all(name)
        number, width = self._shape
        flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
        flat = tf.where(flat < 0, flat + number, flat)  # as Keras: from the end
        with tf.control_dependencies([_check(flat, number, name)]):
            flat = tf.identity(flat)

        unique, places = tf.unique(flat)
        order, counts = _by_owner(unique, engine.size)
        (asked,), received = engine.alltoallv([tf.gather(unique, order)], counts)
        (answers,), _ = engine.alltoallv([raw_variable(self.rows).sparse_read(asked // engine.size)], received)
        read = tf.gather(answers, tf.gather(tf.math.invert_permutation(order), places))

        def of_the_table(handle: Any, read: Any) -> tuple[Any, Any]:
            def gradient(upstream: Any) -> tuple[tf.IndexedSlices, None]:
                # Of all rows: the reduction sends each reading to its owner.
                return self._slices(tf.reshape(upstream, [-1, width]), flat), None

            return tf.reshape(read, [-1, width]), gradient

        found = tf.custom_gradient(of_the_table)(raw_variable(self.rows).handle, tf.stop_gradient(read))
        return tf.reshape(found, tf.concat([tf.shape(ids), [width]], axis=0))

    def penalty(self) -> Any:
        """Returns what the regularizer makes of all rows, a scalar.

        Collective: every rank must call this, in the same order.
        """
        assert self._regularizer is not None  # noqa: S101
        regularizer, engine, width = self._regularizer, self._engine_of_all(self.rows.path), self._shape[1]

        def add_up(rows: Any) -> tuple[Any, Any]:
            (total,) = engine.allreduce([regularizer(rows)])

            def gradient(upstream: Any) -> tf.IndexedSlices:
                # Each rank's loss has a share of the penalty: the shares travel in the row behind the last one.
                self._has_slope = True
                share = tf.cast(tf.reshape(upstream, [1, 1]), rows.dtype)
                return self._slices(tf.pad(share, [[0, 0], [0, width - 1]]), tf.constant([self._shape[0]], tf.int64))

            return total, gradient

        return tf.custom_gradient(add_up)(tf.convert_to_tensor(raw_variable(self.rows)))

    def _engine_of_all(self, name: str) -> Engine:
        """Returns how ranks communicate now."""
        engine = self._strategy.engine
        if engine.size != self.engine.size:
            raise StrategyError(
                f"The model has an embedding table in parts, which a graph for one process cannot read "
                f"(shard_embeddings). Received: an export or a local step of a model with the layer {name!r}. Expected "
                "training, evaluation or prediction on all ranks. Fix: model.save(...), and export what "
                "keras.saving.load_model returns in one process."
            )
        return engine

    def _slices(self, values: Any, ids: Any) -> tf.IndexedSlices:
        number = self._shape[0] + (self._regularizer is not None)  # with the row of the penalty's shares
        return tf.IndexedSlices(values, ids, tf.constant([number, self._shape[1]], tf.int64))

    def sum_of_gradients(self, gradient: Any, engine: Engine) -> Any:
        """Returns the sum over the ranks of a gradient, this rank's rows of it: each reading by itself, in their order.

        With a penalty it is dense, as that of one process.

        Collective: every rank must call this, in the same order.
        """
        number, width = self._shape
        if not isinstance(gradient, tf.IndexedSlices):  # made dense by the training step
            (total,) = engine.allreduce([gradient])
            rows = total[engine.rank : number : engine.size]
            return rows if self._regularizer is None else self._with_slope(rows, total[number, 0])
        indices = tf.cast(gradient.indices, tf.int64)
        if not self._has_slope:
            return self._sum_of_readings(gradient.values, indices, engine)
        is_share, shares = indices == number, gradient.values[:, 0]
        (share,) = engine.allreduce([tf.reduce_sum(tf.where(is_share, shares, tf.zeros_like(shares)))])
        values, indices = (tf.boolean_mask(each, ~is_share) for each in (gradient.values, indices))
        return self._with_slope(tf.convert_to_tensor(self._sum_of_readings(values, indices, engine)), share)

    def _with_slope(self, gradient: Any, share: Any) -> Any:
        """Adds the gradient of the penalty times a share of it to a dense one."""
        assert self._regularizer is not None  # noqa: S101
        rows = tf.convert_to_tensor(raw_variable(self.rows))
        with tf.GradientTape() as tape:
            tape.watch(rows)
            penalty = self._regularizer(rows)
        return gradient + share * tape.gradient(penalty, rows)

    def _sum_of_readings(self, values: Any, indices: Any, engine: Engine) -> tf.IndexedSlices:
        number, width = self._shape
        order, counts = _by_owner(indices, engine.size)
        sent = [tf.gather(values, order), tf.gather(indices, order)]
        (values, ids), _ = engine.alltoallv(sent, counts)
        shape = [num_rows(number, engine.size, engine.rank), width]
        return tf.IndexedSlices(values, ids // engine.size, tf.constant(shape, tf.int64))


def num_rows(number: int, size: int, rank: int) -> int:
    """Returns how many of some rows a rank holds."""
    return len(range(rank, number, size))


def tables_of(model: keras.Model) -> list[Table]:
    """Returns the tables of a model that are in parts."""
    found = [table_of(weight) for layer in layers_of(model) for weight in layer.weights]
    return list(dict.fromkeys(each for each in found if each is not None))


def part_variables_of(weights: Sequence[Any]) -> list[Any]:
    """Returns weights, and of a table the variable of this rank's rows."""
    return [weight if table_of(weight) is None else table_of(weight).rows for weight in weights]


def table_loads(model: keras.Model) -> dict[str, Any]:
    """Returns how many values were assigned to each table of a model, and signs of those it has, to compare."""
    found: dict[str, Any] = {}
    for table in tables_of(model):
        found |= table.values()
    return found


def _by_owner(ids: Any, size: int) -> tuple[Any, Any]:
    """Returns the order in which ids go to the ranks that hold them, and how many go to each."""
    owners = ids % size
    order = tf.argsort(owners, stable=True)
    counts = tf.math.bincount(tf.cast(owners, tf.int32), minlength=size, maxlength=size, dtype=tf.int64)
    return order, tf.ensure_shape(counts, [size])


def _check(ids: Any, number: int, name: str) -> Any:
    is_wrong = (ids < 0) | (ids >= number)
    said = f"Ids are out of range in the layer {name!r}. Expected 0 to {number - 1}. Received:"
    return tf.debugging.Assert(~tf.reduce_any(is_wrong), [said, tf.boolean_mask(ids, is_wrong)], summarize=5)
