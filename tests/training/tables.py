"""`shard_embeddings`: models with tables in parts, against one process: training, files, resume, refusals."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import KDistError
from kdist.planning.activations import status
from kdist.sharding.initial_rows import initial_rows
from kdist.sharding.table import tables_of
from tests.helpers.logs import logged
from tests.training import fidelity
from tests.training.fidelity import BATCH, both, compare, fed, fit_evaluate_predict, fresh, outcome, size
from tests.training.sharded import ClippedChanges, sharded, shared_folder

ROWS, WIDTH, LENGTH = 41, 3, 5
TABLES = kdist.AllReduce(shard_embeddings=8.0 * ROWS * WIDTH)
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def sentences(n: int | None = None, seed: int = 0) -> tuple[Any, Any]:
    """Returns ids by Zipf's law, with repetitions, the last batch ragged on one rank alone, and targets."""
    generator = np.random.default_rng(seed)
    n = 2 * size() * BATCH + BATCH + 1 if n is None else n
    return np.minimum(generator.zipf(1.3, size=(n, LENGTH)) - 1, ROWS - 1), generator.normal(size=(n, 2))


def reader(rows: int = ROWS, mask: bool = False, **table: Any) -> keras.Model:
    layers = [
        keras.layers.Embedding(rows, WIDTH, mask_zero=mask, name="words", **table),
        keras.layers.LSTM(4) if mask else keras.layers.Flatten(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers])
    generator = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=tuple(variable.shape)) * 0.5)
    return model


def is_in_parts(model: keras.Model) -> bool:
    return type(model.get_layer("words").embeddings) is not keras.Variable


def same(
    optimizer: Callable[[], Any], make: Callable[..., keras.Model] = reader, rtol: float = 1e-9, **options: Any
) -> None:
    """Trains, evaluates and predicts as one process does; weights, slots and logs are equal."""
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        model = make()
        assert is_in_parts(model) == tf.distribute.has_strategy()
        model.compile(optimizer(), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script, rtol=rtol, strategy=dataclasses.replace(TABLES, **options))


def by_each(*names: str) -> None:
    for name in names:
        try:
            same(lambda name=name: getattr(keras.optimizers, name)(0.01))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@case
def common_optimizers() -> None:
    """Adam squares each reading of a row by itself; AdamW decays rows that nobody read."""
    by_each("Adam", "AdamW")


@case
def other_elementwise_optimizers() -> None:
    by_each("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")


@case
def clipping_by_norms() -> None:
    """Norms of whole gradients, of which tables have one part at each rank and other weights are whole.

    Keras' `global_clipnorm` makes sparse gradients dense, and Adam squares what it gets.
    """
    for clip in ({"clipnorm": 0.05}, {"global_clipnorm": 0.05}):
        same(lambda clip=clip: keras.optimizers.Adam(0.01, **clip))


@case
def averages_of_weights() -> None:
    same(lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2))


@case
def accumulated_gradients() -> None:
    same(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipvalue=0.01))


class Noted(keras.optimizers.SGD):
    """An optimizer with methods of its own around its state."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store["note"] = np.ones(3)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables({name: store[name] for name in store if name != "note"})
        self.loaded_note = store["note"]

    def finalize_variable_values(self, var_list: Any) -> None:
        for variable in var_list:
            variable.assign(keras.ops.round(variable))


@case
def optimizers_without_a_table_keep_their_methods() -> None:
    """What saves, loads and ends a training is the class's own; of several optimizers in one, too."""
    x, y = fidelity.rows("ragged")

    def several() -> keras.optimizers.Optimizer:
        average = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        return keras.optimizers.MultiOptimizer(lambda variable: average)

    for make in (Noted, *([several] if hasattr(keras.optimizers, "MultiOptimizer") else [])):

        def script(batch: int, make: Callable[[], Any] = make) -> dict[str, Any]:
            model = fidelity.mlp()
            model.compile(make(), "mse")
            found = outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0))
            if make is Noted:
                state: dict[str, Any] = {}
                model.optimizer.save_own_variables(state)
                model.optimizer.load_own_variables(state)
                found["note"] = model.optimizer.loaded_note
            return found

        both(script, strategy=TABLES)


@case
def masks() -> None:
    same(lambda: keras.optimizers.Adam(0.01), lambda: reader(mask=True))


class Positions(keras.layers.Layer):
    """A table that the layer around it does not build: the first lookup does, in the compute dtype's scope."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(ROWS, WIDTH)

    def build(self, shape: Any) -> None:
        self.positions = self.add_weight(shape=(shape[-1], WIDTH))

    def call(self, ids: Any) -> Any:
        return self.words(ids) + self.positions


@case
def a_table_that_its_first_lookup_builds_under_mixed_precision() -> None:
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            layers = [Positions(), keras.layers.Flatten(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers])
            assert bool(tables_of(model)) == tf.distribute.has_strategy()
            fidelity.deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            first = model.predict(x, batch_size=batch, verbose=0).astype("float32")  # by the values that were assigned
            model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0)
            return {"first": first, "weights": model.get_weights()}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script, rtol=0.02, strategy=dataclasses.replace(TABLES, shard_embeddings=1.0))  # bfloat16 rounds by 0.004


@case
def gradients_in_several_messages() -> None:
    same(lambda: keras.optimizers.SGD(0.1), bucket_mb=0.0001)


@case
def frozen_tables() -> None:
    """Also one that is frozen after it was trained: ranks hold other rows, and these are no difference."""
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        model, histories = reader(), []
        for is_trained in (False, True, False):
            model.get_layer("words").trainable = is_trained
            model.compile(keras.optimizers.Adam(0.01), "mse")
            histories.append(model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0).history)
        return outcome(model, histories=histories)

    both(script, strategy=TABLES)


@case
def the_best_weights_are_restored() -> None:
    """`EarlyStopping` reads and sets all weights, on all ranks at the same epoch."""
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        model = reader()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        early = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
        history = model.fit(x, y, batch_size=batch, shuffle=False, epochs=6, verbose=0, callbacks=[early])
        assert len(history.history["loss"]) < 6
        return outcome(model, history)

    both(script, strategy=TABLES)


@case
def ids_from_the_end_and_ragged_ones() -> None:
    """As Keras looks them up: -1 is the last row."""
    x, _ = sentences(n=3)
    ragged = tf.RaggedTensor.from_row_lengths(x.ravel(), [0, LENGTH + 2, 2 * LENGTH - 2])

    def script(batch: int) -> dict[str, Any]:
        layer = keras.layers.Embedding(ROWS, WIDTH, name="words")
        layer.build(())
        layer.set_weights([np.random.default_rng(0).normal(size=(ROWS, WIDTH))])
        read = layer(ragged)
        return {"dense": layer(x - ROWS), "values": read.flat_values, "splits": read.row_splits}

    both(script, strategy=TABLES)


@case
def decay_that_leaves_the_table_out() -> None:
    def optimizer_for(model: keras.Model, by_name: bool) -> keras.optimizers.Optimizer:
        made = keras.optimizers.AdamW(0.01, weight_decay=0.3)
        given = {"var_names": ["words"]} if by_name else {"var_list": [model.get_layer("words").embeddings]}
        made.exclude_from_weight_decay(**given)
        return made

    x, y = sentences()
    for by_name in (False, True):

        def script(batch: int, by_name: bool = by_name) -> dict[str, Any]:
            model = reader()
            model.compile(optimizer_for(model, by_name), "mse")
            return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

        both(script, strategy=TABLES)


class Twice(keras.Model):
    """A table that is read twice, beside a smaller one, and a `train_step` that does not scale its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(ROWS, WIDTH, name="words")
        self.few = keras.layers.Embedding(ROWS // 2, WIDTH)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        read = self.words(inputs) + self.words((inputs + 1) % ROWS) + self.few(inputs // 3)
        return self.dense(keras.ops.reshape(read, (-1, LENGTH * WIDTH)))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@case
def a_table_that_is_read_twice_in_an_own_step() -> None:
    """The other table is whole, or in parts, too."""
    x, y = sentences(n=3 * size() * BATCH)
    are_in_parts: list[int] = []

    def script(batch: int) -> dict[str, Any]:
        model = Twice()
        model.compile(keras.optimizers.Adam(0.01))
        model.build((None, LENGTH))
        generator = np.random.default_rng(2)
        for variable in model.trainable_variables:
            variable.assign(generator.normal(size=tuple(variable.shape)) * 0.3)
        model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0)
        are_in_parts.append(len(tables_of(model)))
        return outcome(model, predict=model.predict(x, batch_size=batch, verbose=0))

    for num_bytes in (TABLES.shard_embeddings, 8.0 * (ROWS // 2) * WIDTH):
        both(script, strategy=dataclasses.replace(TABLES, shard_embeddings=num_bytes))
    assert {1, 2} <= set(are_in_parts), are_in_parts


@case
def an_update_without_the_table() -> None:
    """One optimizer, with averages of all weights, updates other weights and then the table."""
    x, y = sentences(n=3 * size() * BATCH)

    class InTurn(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(data[0], training=True) - data[1]) ** 2)
            pairs = list(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
            for each in (pairs[1:], pairs[:1]):
                self.optimizer.apply_gradients(each)
            return {"loss": loss}

    def script(batch: int) -> dict[str, Any]:
        inner = reader()
        model = InTurn(inner.inputs, inner.outputs)
        model.compile(keras.optimizers.Adam(0.01, use_ema=True))
        model.optimizer.build(model.trainable_variables)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return outcome(model)

    both(script, strategy=TABLES)


@case
def ranks_without_rows() -> None:
    """And all in eager steps."""
    for eager in (False, True):
        x, y = sentences(n=max(1, size() - 1))

        def script(batch: int, x: Any = x, y: Any = y, eager: bool = eager) -> dict[str, Any]:
            model = reader()
            model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=eager)
            return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

        both(script, strategy=TABLES)


@case
def batches_by_hand() -> None:
    x, y = sentences(n=2 * size() * BATCH)

    def script(batch: int) -> dict[str, Any]:
        model = reader()
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=True)
        losses = [model.train_on_batch(x[:8], y[:8]) for _ in range(3)]
        return outcome(model, losses=losses, test=model.test_on_batch(x, y), predict=model.predict_on_batch(x))

    both(script, strategy=TABLES)


@case
def initial_values() -> None:
    """They are one process's, of a fixed seed and of the global one; float32 numbers in blocks."""

    def of_numpy(shape: Any, dtype: Any = None) -> Any:  # in float64, whatever it is asked for
        return np.random.default_rng(3).normal(size=shape)

    drawn = ("uniform", "random_normal", "glorot_uniform", "he_normal", "truncated_normal", "lecun_normal")
    kinds = (*drawn, "zeros", "ones", "orthogonal", of_numpy)

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.utils.set_random_seed(7)
        models = [reader_of(kind, rows) for kind in kinds for rows in (ROWS, 9001)]
        seeded = keras.initializers.RandomUniform(-2.0, 3.0, seed=5)
        return {"weights": [model.get_weights() for model in [*models, reader_of(seeded, 9001)]]}

    def reader_of(initializer: Any, rows: int) -> keras.Model:
        made = keras.layers.Embedding(rows, 30, embeddings_initializer=initializer, name="words")
        return keras.Sequential([keras.Input((LENGTH,), dtype="int64"), made])

    both(script, rtol=0.0, strategy=dataclasses.replace(TABLES, shard_embeddings=1.0))
    for kind in drawn:  # with the seed as their sign: in blocks, of which the table has two
        _, sign = initial_rows(keras.initializers.get(kind), (9001, 30), "float32", size(), kdist.rank())
        assert all(isinstance(each, int) for each in sign), (kind, sign)


@case
def initial_values_of_several_seeds_are_refused() -> None:
    """They would be rows of several tables. Equal values that are assigned, or loaded, take their place."""
    x, y = sentences()
    with kdist.scope(dataclasses.replace(TABLES, shard_embeddings=1.0)):
        for kind in ("uniform", "orthogonal"):
            fresh()
            keras.config.set_floatx("float32")
            keras.utils.set_random_seed(42 + kdist.rank())
            words = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer=kind, name="words")
            layers = [words, keras.layers.Flatten(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers])
            model.compile("sgd", "mse")
            with pytest.raises(KDistError, match="Ranks differ in .*: initial values of .*words/embeddings.*Fix: "):
                model.fit(x, y, verbose=0)
            model.set_weights([np.ones(each.shape) for each in model.get_weights()])
            model.fit(x, y, verbose=0)
            values = np.ones((ROWS, WIDTH))
            values[3] += kdist.rank()  # as that of words that are not known
            words.set_weights([values])
            with pytest.raises(KDistError, match="Ranks differ in .*: checksum of values of .*words/embeddings.*Fix: "):
                model.fit(x, y, verbose=0)
            words.set_weights([np.ones((ROWS, WIDTH))])
            model.fit(x, y, verbose=0)


@case
def what_a_script_sees() -> None:
    """The whole shape; whole values, on all ranks; and operations on them are refused."""
    with kdist.scope(TABLES):
        fresh()
        model = reader()
        table = model.get_layer("words").embeddings
        assert tuple(table.shape) == (ROWS, WIDTH)
        assert model.count_params() == ROWS * WIDTH + LENGTH * WIDTH * 2 + 2
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        assert str(ROWS * WIDTH) in "".join(lines)
        values = np.arange(ROWS * WIDTH, dtype="float64").reshape(ROWS, WIDTH)
        model.set_weights([values, *model.get_weights()[1:]])
        np.testing.assert_array_equal(model.get_weights()[0], values)
        np.testing.assert_array_equal(np.asarray(table), values)
        held = model.get_layer("words").embeddings.kdist_holder.rows
        assert held.shape[0] == len(range(kdist.rank(), ROWS, size()))
        np.testing.assert_array_equal(held.numpy(), values[kdist.rank() :: size()])
        for use in (lambda: table * 2.0, lambda: keras.ops.sum(table), lambda: tf.matmul(table, table)):
            with pytest.raises(KDistError, match="is used as a whole"):
                use()
        with pytest.raises(tf.errors.InvalidArgumentError, match="out of range in the layer 'words'.*\n?.*41"):
            model(np.full((2, LENGTH), ROWS))


@case
def plans_count_whole_tables_and_slots() -> None:
    def planned(model: keras.Model) -> list[int]:
        sizes = kdist.plan(model, batch_size=BATCH, ranks=size()).sizes
        return [sizes.weights, sizes.trained, sizes.slots]

    def compiled() -> keras.Model:
        model = reader()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    x, y = sentences()
    fresh()
    expected = planned(compiled())
    for strategy in (TABLES, dataclasses.replace(TABLES, shard="optimizer")):
        fresh()
        with kdist.scope(strategy):
            model = compiled()
            assert planned(model) == expected
            model.fit(x, y, batch_size=BATCH, verbose=0)
            assert planned(model) == expected


@case
def files_are_those_of_plain_keras() -> None:
    """Saved whole, in a callback too; loaded without kdist, and in parts; another rank's file is refused."""
    folder = shared_folder()
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        model = reader()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        in_scope = tf.distribute.has_strategy()
        callbacks = [keras.callbacks.ModelCheckpoint(str(folder / "epoch.keras"))] if in_scope else []
        model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
        if in_scope:
            model.save(folder / "whole.keras")
            model.save_weights(folder / "whole.weights.h5")
        return outcome(model)

    plain = fidelity.of_the_chief(lambda: script(size() * BATCH))
    fresh()
    with kdist.scope(TABLES, scale_lr=None):
        compare(plain, script(BATCH))
        again = keras.models.load_model(folder / "whole.keras")
        assert is_in_parts(again)
        compare(plain, {**outcome(again), "history": plain["history"]})
        again.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        other = reader()
        other.load_weights(folder / "whole.weights.h5")
        np.testing.assert_allclose(other.get_weights()[0], plain["weights"][0], rtol=1e-9)
        with pytest.raises(KDistError, match="a graph for one process cannot read"):
            other.export(folder / "exported", verbose=False)
        with pytest.raises(KDistError, match="does not fit in the format HDF5"):
            other.save(folder / "whole.h5")
    for name in ("whole", "epoch"):
        alone = keras.models.load_model(folder / f"{name}.keras")  # outside of the scope: plain Keras
        assert type(alone.get_layer("words").embeddings) is keras.Variable
        compare(plain, {**outcome(alone), "history": plain["history"]})


@case
def files_are_written_and_read_in_blocks() -> None:
    """No rank holds a whole table while it is saved or resumed."""

    # The C library keeps freed memory of so much, as it has learnt from other cases, and a rank's part is smaller.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD

    def peak(run: Callable[[], Any]) -> float:
        """Returns the most memory that a call takes, in units of the table."""
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run()
        return (status("VmHWM") - before) / (500_000 * 32 * 4)

    def made() -> keras.Model:
        keras.config.set_floatx("float32")
        table = keras.layers.Embedding(500_000, 32, name="words")
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), table])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    class Measured(kdist.callbacks.BackupAndRestore):
        def save(self, epoch_step: int) -> bool:
            peaks.append(peak(lambda: super(Measured, self).save(epoch_step)))
            return True

        def begin(self) -> None:
            peaks.append(peak(super().begin))

    folder = shared_folder()
    with kdist.scope(TABLES):
        fresh()
        model, other = made(), made()
        peaks = [
            peak(lambda: model.save(folder / "model.keras")),
            peak(lambda: model.save_weights(folder / "model.weights.h5")),
        ]
        assert max(peaks) < 0.7, peaks
        other.load_weights(folder / "model.weights.h5")
        assert np.array_equal(*(each.get_layer("words").embeddings.kdist_holder.rows for each in (model, other)))
        peaks = []
        x, y = np.full((size(), LENGTH), 7), np.ones((size(), LENGTH, 32), "float32")
        for trained in (model, made()):
            backup = Measured(folder / "backup", delete_checkpoint=False)
            trained.fit(x, y, batch_size=1, verbose=0, callbacks=[backup])
        assert len(peaks) == 3, peaks  # the second one resumed at the end
        assert max(peaks) < 0.7, peaks
        rows_of_both = [each.get_layer("words").embeddings.kdist_holder.rows for each in (model, trained)]
        assert np.array_equal(*rows_of_both)
        other.load_weights(folder / "model.weights.h5")
    alone = keras.models.load_model(folder / "model.keras")
    held = alone.get_layer("words").embeddings.numpy()[kdist.rank() :: size()]
    assert np.array_equal(held, other.get_layer("words").embeddings.kdist_holder.rows)


@case
def resumed() -> None:
    """Bit for bit, from a backup in the middle of an epoch."""
    folder = shared_folder()
    x, y = sentences(n=4 * size() * BATCH)

    class Interrupted(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == 6:
                raise Interrupted

    class Steps(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1

    def trained(*callbacks: Any) -> Any:
        fresh()
        with kdist.scope(TABLES, scale_lr=None):
            model = reader()
            model.compile(keras.optimizers.Adam(0.01), "mse")
            history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=list(callbacks))
            return outcome(model, history)

    whole = trained()
    backup = str(folder / "backup")
    with pytest.raises(Interrupted):
        trained(kdist.callbacks.BackupAndRestore(backup, save_freq=2), Interrupt())
    steps = Steps()
    compare(whole, trained(kdist.callbacks.BackupAndRestore(backup, save_freq=2), steps), rtol=0.0)
    assert steps.count == 12 - 4  # the last save before the sixth step


@case
def refusals() -> None:
    with kdist.scope(dataclasses.replace(TABLES, shard_embeddings=1.0)):
        fresh()
        for given in ({"embeddings_regularizer": "orthogonal_regularizer"}, {"embeddings_constraint": "max_norm"}):
            (name,) = given
            with pytest.raises(KDistError, match=f"(?s)does not support {name}=.*Fix: "):
                reader(**given)
        x, y = sentences()
        for optimizer in (keras.optimizers.Lamb(0.01), ClippedChanges(0.01)):
            model = reader()
            model.compile(optimizer, "mse")
            with pytest.raises(
                KDistError, match=f"(?s)does not support this optimizer.*{type(optimizer).__name__}.*SGD"
            ):
                model.fit(x, y, verbose=0)
        model = reader()
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
        for callback in (
            kdist.callbacks.NaNPolicy(),
            kdist.callbacks.ReplicaCheck(),
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.TensorBoard(str(shared_folder()), embeddings_freq=1),
        ):
            with pytest.raises(KDistError, match=f"(?s)does not support.*{type(callback).__name__}.*Fix: "):
                model.fit(x, y, verbose=0, callbacks=[callback])
        assert model.optimizer.iterations == 0
        optimizer = keras.optimizers.SGD(0.1)
        variables = model.trainable_variables
        with pytest.raises(KDistError, match="training loop of the script's own"):
            optimizer.apply([tf.zeros(each.shape) for each in variables], variables)


@case
def data_of_unknown_length_and_weight_decay() -> None:
    """Plain Keras' graph decays the weights once more in the step that finds the end of the data."""
    x, y = sentences(4 * size() * BATCH)

    def script(batch: int) -> dict[str, Any]:
        model = reader()
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *_: True).batch(batch)
        return outcome(model, model.fit(data, epochs=2, verbose=0))

    both(script, strategy=TABLES)


@case
def saves_that_fail_or_are_declined() -> None:
    """The rank that writes raises; no rank waits for another, and all go on."""
    folder = shared_folder()
    x, y = sentences()
    (folder / "directory.keras").mkdir(exist_ok=True)
    with kdist.scope(TABLES):
        fresh()
        model = reader()
        assert is_in_parts(model)
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
        model.save(folder / "there.keras")
        with mock.patch("keras.src.utils.io_utils.input", return_value="n", create=True):
            model.save(folder / "there.keras", overwrite=False)
        for name in ("directory.keras", "no/such/folder.keras", "name_without_an_ending"):
            with fails_on_the_chief():
                model.save(folder / name)
        with fails_on_the_chief():
            model.save_weights(folder / "name.txt")
        with fails_on_the_chief(), limited_files():
            model.save(folder / "too_large.keras")
        kdist.barrier()
        model.fit(x, y, verbose=0)
        model.save(folder / "there.keras")
        again = keras.models.load_model(folder / "there.keras")
        np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    kdist.barrier()
    assert not [each.name for each in folder.iterdir() if each.name.startswith((".", "too_large"))]


@case
def files_that_skip_objects() -> None:
    """Other ranks do not send what the file is without, also where it cannot be written."""
    folder = shared_folder()
    x, y = sentences()
    with kdist.scope(TABLES, stall_timeout=30.0):
        fresh()
        model, other = reader(), reader()
        for each in (model, other):
            each.compile("adam", "mse")
            each.fit(x, y, verbose=0)
        values = np.zeros((ROWS, WIDTH))
        model.get_layer("words").set_weights([values])
        words = model.get_layer("words")
        with fails_on_the_chief():
            keras.saving.save_weights(model, folder / "no/such/folder.weights.h5", objects_to_skip=[words])
        keras.saving.save_weights(model, folder / "skipped.weights.h5", objects_to_skip=[words])
        before = other.get_layer("words").get_weights()[0]
        other.load_weights(folder / "skipped.weights.h5", objects_to_skip=[other.get_layer("words")])
        after = other.get_weights()
        np.testing.assert_array_equal(after[0], before)
        for one, two in zip(after[1:], model.get_weights()[1:], strict=True):
            np.testing.assert_array_equal(one, two)
        for one, two in zip(fidelity.state_of(other.optimizer), fidelity.state_of(model.optimizer), strict=True):
            np.testing.assert_array_equal(one, two)


@contextlib.contextmanager
def fails_on_the_chief() -> Iterator[None]:
    if kdist.is_chief():
        with pytest.raises((OSError, ValueError)):
            yield
    else:
        yield


@contextlib.contextmanager
def limited_files() -> Iterator[None]:
    """No file of this process can be larger than 1 KB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@case
def uses_of_a_whole_table_are_refused() -> None:
    """Before the first step: an output layer with the embedding's weights, `value`, histograms on one rank."""

    class Tied(keras.layers.Layer):
        def __init__(self, embedding: keras.layers.Embedding) -> None:
            super().__init__()
            self.embedding = embedding

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    def tied() -> None:
        words = keras.layers.Embedding(ROWS, WIDTH)
        inputs = keras.Input((LENGTH,), dtype="int64")
        keras.Model(inputs, Tied(words)(words(inputs)))

    x, y = sentences()
    with kdist.scope(TABLES):
        fresh()
        model = reader()
        table = model.get_layer("words").embeddings
        uses = (lambda: tf.reduce_sum(table.value), lambda: table.value.numpy(), lambda: table != 1.0)
        for use in (tied, *uses):
            # Keras and TensorFlow put what a layer raises into an error of their own.
            with pytest.raises((KDistError, ValueError), match="(?s)is used as a whole.*Fix: "):
                use()
        assert "in parts" in repr(table)
        with pytest.raises(KDistError, match="(?s)tf.train.Checkpoint.*Fix: model.save"):
            tf.train.Checkpoint(model=model).write(str(shared_folder() / "checkpoint"))
        model.compile("sgd", "mse")
        writer = keras.callbacks.TensorBoard(str(shared_folder()), histogram_freq=1)
        with pytest.raises(KDistError, match="(?s)does not support TensorBoard.histogram_freq.*Fix: "):
            model.fit(x, y, verbose=0, callbacks=[writer])
        assert model.optimizer.iterations == 0
        model.get_layer("words").enable_lora(2)
        with pytest.raises((KDistError, ValueError), match="(?s)cannot be changed afterwards.*lora_rank.*Fix: "):
            model.predict(x, verbose=0)


class Cell(keras.layers.Layer):
    """Looks one id of each sentence up."""

    state_size = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(ROWS, WIDTH)
        self.dense = keras.layers.Dense(WIDTH, "tanh")

    def build(self, shape: Any) -> None:
        self.words.build()
        self.dense.build((None, 2 * WIDTH))

    def call(self, x: Any, states: Any) -> Any:
        state = self.dense(keras.ops.concatenate([self.words(keras.ops.cast(x[:, 0], "int32")), states[0]], axis=-1))
        return state, [state]


class Branch(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(ROWS, WIDTH)

    def build(self, shape: Any) -> None:
        self.words.build()

    def call(self, x: Any) -> Any:
        ids = tf.cast(x[..., 0], tf.int32)
        read = tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: self.words(ids),
            lambda: tf.zeros([*tf.unstack(tf.shape(ids)), WIDTH], x.dtype),
        )
        return tf.ensure_shape(tf.reduce_mean(read, axis=1), [None, WIDTH])


@case
def lookups_in_loops() -> None:
    """In a loop of the graph they are refused in training; unrolled, they are as in one process."""
    x, y = sentences()
    x = x[..., np.newaxis].astype("float64")

    def made(inner: keras.layers.Layer) -> keras.Model:
        model = keras.Sequential([keras.Input((LENGTH, 1)), inner, keras.layers.Dense(2)])
        fidelity.deterministic_weights(model)
        model.compile("sgd", "mse")
        return model

    with kdist.scope(TABLES):
        for make in (lambda: keras.layers.RNN(Cell()), Branch):
            fresh()
            with pytest.raises(KDistError, match="(?s)looked up in a loop or a branch.*Received: .*Fix: .*unroll=True"):
                made(make()).fit(x, y, verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model = made(keras.layers.RNN(Cell(), unroll=True))
        return outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0))

    both(script, strategy=TABLES)


class Shared(keras.Model):
    """Two layers with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(ROWS, WIDTH, name="words")
        self.others = keras.layers.Embedding(ROWS, WIDTH)
        self.dense = keras.layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.words.build(shape)
        self.others.build(shape)
        self.others._tracker.unlock()
        self.others._embeddings = self.words.embeddings
        self.others._trainable_variables = [self.words.embeddings]
        self.dense.build((None, LENGTH * WIDTH))

    def call(self, x: Any) -> Any:
        read = self.words(x) + 2 * self.others(x)
        return self.dense(keras.ops.reshape(read, (-1, LENGTH * WIDTH)))


@case
def a_table_of_two_layers() -> None:
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        model = Shared()
        model.build((None, LENGTH))
        for place, weight in enumerate(model.trainable_variables):
            weight.assign(np.random.default_rng(place).normal(size=weight.shape))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        history = model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0).history
        return {"weights": model.get_weights(), "history": history, "predict": model.predict(x, verbose=0)}

    both(script, strategy=TABLES)


@case
def regularizers() -> None:
    """In an own step, where the penalty is half of a loss, too; the gradient of a table is dense then."""
    x, y = sentences()
    both_kinds = keras.regularizers.L1L2(0.05, 0.1)
    same(
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        lambda: reader(embeddings_regularizer=both_kinds),
    )

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(data[0], training=True) - data[1]) ** 2) + 0.5 * sum(self.losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            if self.is_dense:
                gradients = [tf.convert_to_tensor(each) for each in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    for is_dense in (False, True):

        def script(batch: int, is_dense: bool = is_dense) -> dict[str, Any]:
            inner = reader(embeddings_regularizer=keras.regularizers.L2(0.1))
            model = OwnStep(inner.inputs, inner.outputs)
            model.is_dense = is_dense
            model.compile(keras.optimizers.Adam(0.01))
            history = model.fit(x[:-1], y[:-1], batch_size=batch, shuffle=False, epochs=2, verbose=0)
            return outcome(model, loss=history.history["loss"][:0])

        both(script, strategy=TABLES)


@case
def constraints() -> None:
    """Of each number and of each row."""
    kinds = keras.constraints
    for made in (kinds.NonNeg(), kinds.MaxNorm(0.3, axis=1)):
        same(lambda: keras.optimizers.Adam(0.05), lambda made=made: reader(embeddings_constraint=made))


@case
def layers_with_a_lookup_of_their_own_are_whole() -> None:
    class Doubled(keras.layers.Embedding):
        def call(self, inputs: Any) -> Any:
            return 2 * super().call(inputs)

    with kdist.scope(dataclasses.replace(TABLES, shard_embeddings=1.0)):
        fresh()
        layer = Doubled(ROWS, WIDTH)
        layer.build(())
        assert type(layer.embeddings) is keras.Variable


@case
def tables_that_are_made_elsewhere_are_told_of() -> None:
    x, y = sentences()
    fresh()
    large, small = keras.layers.Embedding(ROWS, WIDTH, name="words"), keras.layers.Embedding(ROWS // 2, WIDTH)
    for layer in (large, small):
        layer.build(())
    with kdist.scope(TABLES), logged() as lines:
        inputs = keras.Input((LENGTH,), dtype="int64")
        read = [keras.layers.Flatten()(each) for each in (large(inputs), small(inputs // 3))]
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.concatenate(read)))
        model.compile("sgd", "mse")
        for _ in range(2):
            model.fit(x, y, verbose=0)
        reader().predict(x, verbose=0)
    told = [line for line in lines if "is whole on each rank" in line]
    assert len(told) == kdist.is_chief(), lines
    assert all("'words', 984 bytes" in line and "outside of kdist.scope()" in line for line in told), told


@case
def mixed_precision() -> None:
    """A loss scale, of which all ranks skip the same updates."""
    x, y = sentences()

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = reader()
            model.compile(keras.optimizers.Adam(0.01), "mse")
            model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0)
            return {"weights": model.get_weights(), "steps": [int(model.optimizer.iterations)]}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script, rtol=2e-2, strategy=dataclasses.replace(TABLES, shard_embeddings=4.0 * ROWS * WIDTH))


@case
def clipping_by_norms_beside_float8_layers() -> None:
    """Keras clips without the scales of these layers, which it sets before."""
    x, y = sentences()
    for clip in ({"clipnorm": 0.05}, {"global_clipnorm": 0.05}):

        def script(batch: int, clip: Any = clip) -> dict[str, Any]:
            keras.config.set_floatx("float32")
            model = reader()
            model.layers[-1].quantize("float8")
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9, **clip), "mse")
            return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

        both(script, rtol=1e-2, strategy=dataclasses.replace(TABLES, shard_embeddings=1.0))  # rounded to 8 bits


WITH_SHARDED_SLOTS = (
    *("common_optimizers", "clipping_by_norms", "averages_of_weights", "accumulated_gradients", "frozen_tables"),
    *("decay_that_leaves_the_table_out", "a_table_that_is_read_twice_in_an_own_step", "batches_by_hand"),
    *("files_are_those_of_plain_keras", "resumed", "mixed_precision", "regularizers", "constraints"),
)
"""With `shard="optimizer"` beside it: all other weights are updated in parts, too."""
CASES |= {f"{name}_with_sharded_slots": sharded(CASES[name]) for name in WITH_SHARDED_SLOTS}
