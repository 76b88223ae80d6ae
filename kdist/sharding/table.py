"""An embedding table of which each rank holds the rows `r` with `r % size == rank`."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.trainer import layers_of
from kdist.keras_hooks.variables import raw_variable


class Table:
    """The rows of one `Embedding` layer; see `TableVariable` for what a script sees.

    Args:
        engine: `Engine`, of all ranks.
        shape: pair of ints, the number of all rows and their length.
        rows: `keras.Variable`, this rank's rows.

    Attributes:
        num_loads: int, how many values were assigned, which every rank must do.
    """

    def __init__(self, engine: Engine, shape: tuple[int, int], rows: keras.Variable) -> None:
        self.engine = engine
        self._shape = shape
        self.rows = rows
        self.num_loads = 0

    # The table itself, and slots of its shape; see `SlotsInParts`.

    def has(self, variable: Any) -> bool:
        """Returns whether a variable is the table."""
        return table_of(variable) is self

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of all rows."""
        return list(self._shape)

    def whole(self, variable: Any) -> Any:
        """Returns all rows, an array.

        Collective: every rank must call this, in the same order.
        """
        (gathered,) = self.engine.allgather([tf.convert_to_tensor(raw_variable(variable))])
        by_rank, start = gathered.numpy(), 0
        found = np.empty(self._shape, by_rank.dtype)
        for rank in range(self.engine.size):
            stop = start + num_rows(self._shape[0], self.engine.size, rank)
            found[rank :: self.engine.size] = by_rank[start:stop]
            start = stop
        return found

    def assign(self, variable: Any, array: Any) -> None:
        """Sets this rank's rows to those of an array, a tensor or an open HDF5 dataset, which is not read whole."""
        if tuple(array.shape) != self._shape:
            raise ValueError(
                f"The shape of the value is not that of the table. Received: a value of shape {tuple(array.shape)} for "
                f"{self.rows.path!r}. Expected the shape of all rows, {self._shape}."
            )
        self.num_loads += 1
        raw = raw_variable(variable)
        raw.assign(tf.cast(array[self.engine.rank :: self.engine.size], raw.dtype))

    def refuse(self) -> NoReturn:
        """Raises `StrategyError`."""
        raise StrategyError(
            f"A layer's table is used as a whole, and each rank holds some of its rows (shard_embeddings). Received: "
            f"{self.rows.path!r} in an operation, as in a model whose output layer has the weights of its embedding. "
            "Expected lookups by the layer alone. Fix: use a weight of its own there, or a larger number for "
            "shard_embeddings."
        )

    # Lookups and gradients.

    def look_up(self, ids: Any, engine: Engine, name: str) -> Any:
        """Returns the rows of some ids, each sent once by the rank that holds it.

        Collective: every rank must call this, in the same order. The gradient of the table has the ids of this rank.

        Args:
            ids: integer tensor of any shape; negative ones count from the end.
            engine: `Engine`, how ranks communicate now.
            name: str, the layer's name.
        """
        if engine.size != self.engine.size:
            raise StrategyError(
                f"The model has an embedding table in parts, which a graph for one process cannot read "
                f"(shard_embeddings). Received: an export or a local step of a model with the layer {name!r}. Expected "
                "training, evaluation or prediction on all ranks. Fix: model.save(...), and export what "
                "keras.saving.load_model returns in one process."
            )
        number, width = self._shape
        flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
        flat = tf.where(flat < 0, flat + number, flat)  # as Keras: from the end
        with tf.control_dependencies([_check(flat, number, name)]):
            flat = tf.identity(flat)

        def read(rows: Any) -> tuple[Any, Any]:
            unique, places = tf.unique(flat)
            order, counts = _by_owner(unique, engine.size)
            (asked,), received = engine.alltoallv([tf.gather(unique, order)], counts)
            (answers,), _ = engine.alltoallv([tf.gather(rows, asked // engine.size)], received)
            found = tf.gather(answers, tf.gather(tf.math.invert_permutation(order), places))

            def gradient(upstream: Any) -> tf.IndexedSlices:
                # Of all rows: the reduction sends each reading to its owner.
                return tf.IndexedSlices(tf.reshape(upstream, [-1, width]), flat, tf.constant([number, width], tf.int64))

            return tf.reshape(found, [-1, width]), gradient

        found = tf.custom_gradient(read)(tf.convert_to_tensor(raw_variable(self.rows)))
        return tf.reshape(found, tf.concat([tf.shape(ids), [width]], axis=0))

    def sum_of_gradients(self, gradient: Any, engine: Engine) -> Any:
        """Returns the sum over the ranks of a gradient, this rank's rows of it: each reading by itself, in their order.

        Collective: every rank must call this, in the same order.
        """
        if not isinstance(gradient, tf.IndexedSlices):  # made dense by the training step
            return engine.allreduce([gradient])[0][engine.rank :: engine.size]
        indices = tf.cast(gradient.indices, tf.int64)
        order, counts = _by_owner(indices, engine.size)
        sent = [tf.gather(gradient.values, order), tf.gather(indices, order)]
        (values, ids), _ = engine.alltoallv(sent, counts)
        shape = [num_rows(self._shape[0], engine.size, engine.rank), self._shape[1]]
        return tf.IndexedSlices(values, ids // engine.size, tf.constant(shape, tf.int64))


def num_rows(number: int, size: int, rank: int) -> int:
    """Returns how many of some rows a rank holds."""
    return len(range(rank, number, size))


def tables_of(model: keras.Model) -> list[Table]:
    """Returns the tables of a model that are in parts."""
    found = [table_of(weight) for layer in layers_of(model) for weight in layer.weights]
    return list(dict.fromkeys(each for each in found if each is not None))


def table_loads(model: keras.Model) -> dict[str, int]:
    """Returns how many values were assigned to each table of a model, for a comparison."""
    return {f"values assigned to {each.rows.path}": each.num_loads for each in tables_of(model)}


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
