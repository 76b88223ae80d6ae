"""`keras.layers.Embedding` with a table of which this rank holds some rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from kdist.errors import StrategyError
from kdist.keras_hooks.layers.parts import Holder, PartVariable
from kdist.keras_hooks.patching import patch, patched

_STATELESS = "stateless_scope"

_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "divmod", "mod", "pow", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rmatmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror", "rxor"),
    *("neg", "pos", "abs", "invert", "round", "ne", "ge", "gt", "le", "lt", "getitem", "tf_tensor"),
)


class WholeTable(Holder, Protocol):
    """The distributed table behind a `TableVariable`."""

    def penalty(self) -> Any:
        """Returns what the layer's regularizer makes of all rows. Collective, as `whole`."""
        ...

    def refuse(self) -> Any:
        """Raises for a use of the variable that would take this rank's rows for all."""
        ...


class TableVariable(PartVariable):
    """A layer's table: of the shape of all rows, of which this rank holds some.

    It is read and assigned to as a whole: `numpy()` gathers the rows of all ranks. Operations refuse it.
    """

    kdist_holder: WholeTable

    @property
    def value(self) -> Any:
        """A stand-in that has the variable's name and raises when it is used as a tensor, which has some rows only."""
        return _Value(self)

    @property
    def handle(self) -> Any:
        """The handle of the variable with this rank's rows."""
        return self._value.handle

    def numpy(self) -> Any:
        """Returns all rows. Collective: every rank must call this, in the same order."""
        return self.kdist_holder.whole(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def assign(self, value: Any) -> Any:
        """Sets this rank's rows to those of all rows."""
        self.kdist_holder.assign(self, value)
        return value

    def assign_add(self, value: Any) -> Any:
        """Refuses."""
        return self.kdist_holder.refuse()

    assign_sub = assign_add


def _refused(self: TableVariable | _Value, *args: Any, **kwargs: Any) -> Any:
    return self.kdist_holder.refuse()


class _Value:
    """The value of a table, of which optimizers read the name."""

    def __init__(self, variable: TableVariable) -> None:
        self.handle, self._unique_id = variable.handle, variable._value._unique_id
        self.shape, self.dtype, self.kdist_holder = variable.shape, variable._value.dtype, variable.kdist_holder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # Keras asks for some that a `tf.Variable` need not have
        return self.kdist_holder.refuse()


for _name in _ARITHMETIC:
    setattr(TableVariable, f"__{_name}__", _refused)
    setattr(_Value, f"__{_name}__", _refused)


def make_table(
    layer: keras.layers.Embedding,
    initial_rows: Callable[[Any], tuple[Any, Any]],
    make: Callable[[Any, Any], WholeTable],
) -> None:
    """Builds a layer whose table has this rank's rows alone.

    Args:
        layer: `keras.layers.Embedding`, not built.
        initial_rows: callable that takes a dtype and returns this rank's rows, and a sign of all rows.
        make: callable that takes the `keras.Variable` of this rank's rows, and the sign, and returns the table.
    """
    with tf.init_scope(), _without_stateless_scope():  # where Keras would put the values off
        first, sign = initial_rows(layer.variable_dtype)
        made = layer.add_weight(
            shape=first.shape, initializer=lambda *_, **__: first, name="embeddings", trainable=True
        )
        # Not `made.dtype`: under mixed precision that of a layer within another one is the compute dtype here.
        rows = keras.Variable(made._value, dtype=layer.variable_dtype, trainable=True, name=made.name)
    rows._path = made.path
    patch(made, "__class__", TableVariable)
    made._shape = layer.input_dim, layer.output_dim
    made.kdist_holder = make(rows, sign)
    if layer.embeddings_regularizer is not None:
        made.regularizer = lambda _: made.kdist_holder.penalty()
    rows.constraint = layer.embeddings_constraint  # the optimizer applies it to what it updates
    layer._embeddings = made
    layer.built = True


@contextlib.contextmanager
def _without_stateless_scope() -> Iterator[None]:
    outer = global_state.get_global_attribute(_STATELESS)
    global_state.set_global_attribute(_STATELESS, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_STATELESS, outer)


def set_lookup(layer: keras.layers.Embedding, look_up: Callable[[Any, Any], Any]) -> None:
    """Makes a layer's `call` return `look_up(table, ids)`, in the layer's compute dtype.

    The table is that of the layer's variable, which a script may replace by that of another layer.
    """

    def call(inputs: Any) -> Any:
        table = table_of(layer._embeddings)
        if table is None:
            return keras.layers.Embedding.call(layer, inputs)
        if later := refusal_reasons(layer):
            raise StrategyError(
                f"A table in parts cannot be changed afterwards. Received: {', '.join(later)} of the layer "
                f"{layer.name!r}, set after it was built with shard_embeddings. Expected a table that is looked up "
                "alone. Fix: a larger shard_embeddings, which leaves this table whole."
            )
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else keras.ops.cast(inputs, "int32")
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(tf.cast(look_up(table, ids.flat_values), layer.compute_dtype))
        return keras.ops.cast(look_up(table, keras.ops.convert_to_tensor(ids, sparse=False)), layer.compute_dtype)

    patch(layer, "call", call)


def has_plain_lookup(layer: keras.layers.Embedding) -> bool:
    """Returns whether a layer looks its rows up as Keras' own class does."""
    return all(
        getattr(type(layer), name) is getattr(keras.layers.Embedding, name)
        for name in ("call", "embeddings", "save_own_variables", "load_own_variables")
    )


@contextlib.contextmanager
def built_by(build: Callable[[keras.layers.Embedding], bool]) -> Iterator[None]:
    """Calls `build(layer)` for each `Embedding` that is made while the context is open; Keras builds it on False."""
    original = keras.layers.Embedding.build

    def build_table(self: keras.layers.Embedding, input_shape: Any = None) -> None:
        if self.built or not build(self):
            original(self, input_shape)

    with patched(keras.layers.Embedding, "build", build_table):
        yield


def table_of(variable: Any) -> Any:
    """Returns the table of a `TableVariable`; `None` of any other variable."""
    return variable.kdist_holder if isinstance(variable, TableVariable) else None


def refusal_reasons(layer: keras.layers.Embedding) -> list[str]:
    """Returns the arguments of a layer with which it has other weights than its table."""
    given = {"lora_rank": layer.lora_rank, "quantization": layer.quantization_mode}
    return [name for name, value in given.items() if value]
