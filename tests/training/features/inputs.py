"""Kinds of data, and how their batches are shared out."""

from __future__ import annotations

import importlib.util
import random
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.errors import MismatchError
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    Batches,
    both,
    compare,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    fresh,
    mlp,
    outcome,
    rows,
    size,
)


@feature
def split_batches() -> None:
    """`scale_batch=False`: each batch of the user's is split, whatever kind it comes in."""
    _split_batches(("arrays", "ragged"), ("tf_data", "few"), ("py_dataset", "ragged"), ("generator", "few"))


@feature
def split_batches_of_other_sizes() -> None:
    _split_batches(("arrays", "few"), ("tf_data", "ragged"), ("py_dataset", "few"), ("generator", "ragged"))


def _split_batches(*kinds: tuple[str, str]) -> None:
    for kind, shape in kinds:
        x, y = rows(shape)

        def script(_: int, kind: str = kind, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            data = fed(kind, (x, y), 6)
            if kind != "arrays":  # what is evaluated and predicted is always arrays
                return fit_alone(model, data)
            return fit_evaluate_predict(model, data, x, y, 6)

        both(script, scale_batch=False)


@feature
def py_dataset_of_batches_of_other_lengths() -> None:
    """Batches padded for themselves: all of a rank's may have one length, another than the other ranks'."""

    class Trimmed(Batches):
        def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
            x, y = super().__getitem__(index)
            return x[:, : np.count_nonzero(np.any(x, axis=(0, 2)))], y

    def sequences_in(num_batches: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(num_batches).normal(size=(num_batches * BATCH, 9, 3))
        for number in range(num_batches):
            x[number * BATCH : (number + 1) * BATCH, 4 + number % size() :] = 0
        return x, np.sum(x, axis=(1, 2))[:, None]

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((None, 3)),
                keras.layers.Dense(4, activation="tanh", use_bias=False),
                keras.layers.Lambda(lambda h: keras.ops.sum(h, axis=1)),
                keras.layers.Dense(1),
            ]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        held_out = Trimmed(sequences_in(size()), batch)  # one step
        history = model.fit(
            Trimmed(sequences_in(3 * size()), batch), epochs=2, shuffle=False, validation_data=held_out, verbose=0
        )
        return outcome(model, history)

    both(script)


@feature
def kinds_of_arrays() -> None:
    """A table of pandas, tensors, a sparse matrix of SciPy."""
    x, y = rows("ragged")
    import pandas
    import scipy.sparse

    sparse = scipy.sparse.csr_matrix(np.where(np.abs(x) > 0.5, x, 0.0))
    for features, targets in (
        (pandas.DataFrame(x), pandas.DataFrame(y)),
        (tf.constant(x), tf.constant(y)),
        (sparse, y),
    ):

        def script(batch: int, features: Any = features, targets: Any = targets) -> dict[str, Any]:
            model = keras.Sequential([keras.Input((5,), sparse=features is sparse), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            return outcome(
                model,
                model.fit(features, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0),
                predict=model.predict(features, batch_size=batch, verbose=0),
            )

        both(script)


kinds_of_arrays.needs_every_package = True  # type: ignore[attr-defined]


@feature
def arrays_in_another_order_on_each_rank_are_refused() -> None:
    """As an unseeded split of the samples gives before the scope."""
    x, y = rows("even")
    order = np.random.default_rng(kdist.rank()).permutation(len(x))
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with pytest.raises(MismatchError, match="Each rank has other data"):
            model.fit(x[order], y[order], verbose=0)
        batches = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
        with pytest.raises(MismatchError, match="Each rank has other data"):
            model.fit(batches, verbose=0)
        drawn = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9, seed=kdist.rank() + 1).batch(BATCH)
        with pytest.raises(MismatchError, match="Received: other seeds in `model.fit`"):
            model.fit(drawn, verbose=0)
        own = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
    with kdist.scope(auto_shard=False):
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(own, verbose=0)


@feature
def functions_of_other_tables_on_each_rank_are_refused() -> None:
    """As a vocabulary that was built from an unseeded split before the scope; seeds may differ."""
    words = np.array([f"word{number}" for number in range(12)])
    mine = words[np.random.default_rng(kdist.rank()).permutation(12)]
    rank = float(kdist.rank())

    def statically(vocabulary: Any) -> Any:
        keys = tf.lookup.KeyValueTensorInitializer(vocabulary, np.arange(12))
        return tf.lookup.StaticHashTable(keys, -1)

    def in_a_branch(table: Any) -> Any:
        return lambda word: tf.cond(tf.strings.length(word) > 0, lambda: table[word], lambda: tf.constant(0, tf.int64))

    def last_of(values: Any) -> Any:
        return lambda _: values[-1]

    lookups = {
        "StringLookup": lambda words, _: keras.layers.StringLookup(vocabulary=words),
        "TextVectorization": lambda words, _: keras.layers.TextVectorization(
            vocabulary=words, output_sequence_length=1
        ),
        "StaticHashTable": lambda words, _: statically(words).lookup,
        "nested": lambda words, _: in_a_branch(statically(words)),
        "IntegerLookup": lambda words, number: (
            lambda word: keras.layers.IntegerLookup(vocabulary=[1, 2, 3 + int(number)])(tf.strings.length(word))
        ),
        "variable": lambda _, number: last_of(tf.Variable([1.0, number])),
        "tensor": lambda _, number: last_of(tf.constant([1.0, number])),
    }

    def batches(lookup: Any) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(words)
        return dataset.map(lambda word: (tf.reshape(tf.cast(lookup(word), "float32"), [1]), [1.0])).batch(3)

    layer = keras.layers.GaussianNoise(1.0, seed=kdist.rank() + 1)
    generator = tf.random.Generator.from_seed(kdist.rank())
    seed = tf.constant([kdist.rank(), 1])
    with kdist.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for lookup in lookups.values():
            with pytest.raises(MismatchError, match="lookup tables, variables and tensors in its functions"):
                model.fit(batches(lookup(mine, rank)), verbose=0)
            model.fit(batches(lookup(words, 0.0)), verbose=0)
        for noise in (
            lambda _: layer(tf.zeros([1]), training=True),
            lambda _: generator.normal([]),
            lambda _: tf.random.stateless_uniform([], seed),
        ):
            model.fit(batches(noise), verbose=0)


@feature
def shuffled_batches() -> None:
    """What the ranks train on in shuffled epochs, trained on by one process in the same batches."""
    x, y = rows("even")
    numbers = np.arange(len(x))

    def shuffled(kind: str) -> dict[str, Any]:
        arrays = ({"x": x, "number": numbers}, y)
        if kind == "arrays":
            return {"x": arrays[0], "y": y, "batch_size": BATCH}
        data = tf.data.Dataset.from_tensor_slices(arrays)
        return {"x": data.shuffle(len(x), seed=1).batch(BATCH)}

    class Noting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.numbers: list[list[int]] = []

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs["x"])

        def train_step(self, data: Any) -> Any:
            note = lambda numbers: self.numbers.append(numbers.tolist())  # noqa: E731
            tf.numpy_function(note, [data[0]["number"]], [])
            return super().train_step(data)

    engine = open_engine(kdist.cluster_info())
    for kind in ("arrays", "tf_data"):
        fresh()
        with kdist.scope(scale_lr=None):
            ours = Noting()
            ours.compile(keras.optimizers.Adam(0.01), "mse")
            ours.fit(**shuffled(kind), epochs=2, verbose=0)
        steps = [sum(step, []) for step in zip(*engine.gather_objects(ours.numbers), strict=True)]
        first, second = sum(steps[: len(steps) // 2], []), sum(steps[len(steps) // 2 :], [])
        assert sorted(first) == sorted(second) == numbers.tolist()
        assert first != second != numbers.tolist() != first
        fresh()
        plain = mlp()
        plain.compile(keras.optimizers.Adam(0.01), "mse")
        order = first + second
        plain.fit(x[order], y[order], batch_size=size() * BATCH, shuffle=False, verbose=0)
        compare({"weights": plain.get_weights()}, {"weights": ours.inner.get_weights()})


def sum_of_rows() -> keras.Model:
    """A model whose weights after an epoch are of all its rows, in whatever order: each is seen once, or it shows."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    deterministic_weights(model)
    model.compile(keras.optimizers.SGD(0.01), lambda y, y_pred: keras.ops.mean(y * y_pred, axis=-1))
    return model


@feature
def epoch_hooks_that_shuffle_while_batches_are_loaded() -> None:
    """Batches that are loaded ahead draw from the state that decides about the order, as augmentation does."""
    x, y = rows("even")

    class Shuffled(Batches):
        def __init__(self, *args: Any, hook: str, **options: Any) -> None:
            super().__init__(*args, **options)
            self.order = np.arange(len(x))
            self.hook = hook

        def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
            np.random.normal(size=1 + index % size())  # each rank draws as many as its batches need
            first = index * self.batch
            chosen = self.order[first : first + self.batch]
            return x[chosen], y[chosen]

        def on_epoch_begin(self) -> None:
            self._shuffle("on_epoch_begin")

        def on_epoch_end(self) -> None:
            self._shuffle("on_epoch_end")

        def _shuffle(self, hook: str) -> None:
            if hook == self.hook:
                time.sleep(0.1)
                np.random.shuffle(self.order)

    engine = open_engine(kdist.cluster_info())
    for hook, workers, steps_per_epoch in (
        ("on_epoch_begin", 2, None),
        ("on_epoch_end", 2, size()),
        ("on_epoch_end", 1, size()),
    ):
        fresh()
        with kdist.scope(scale_lr=None):
            model, data = sum_of_rows(), Shuffled((x, y), BATCH, hook=hook, workers=workers)
            model.fit(data, epochs=3, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0)
        orders = engine.gather_objects(data.order.tolist())
        assert orders[1:] == orders[:-1] != [list(range(len(x)))] * (size() - 1), (hook, workers)


@feature
def a_model_is_trained_while_another_one_reads_a_generator() -> None:
    """Each rank's random state may be another one then: of what is read ahead, of what the chief alone draws."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        probe, main = sum_of_rows(), sum_of_rows()

        class Probe(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if kdist.rank() == 0:
                    random.random()
                probe.fit(x, y, batch_size=batch, verbose=0)

        def batches() -> Any:
            while True:
                for start in range(0, len(x), batch):
                    yield x[start : start + batch], y[start : start + batch]

        history = main.fit(batches(), steps_per_epoch=len(x) // batch, epochs=2, callbacks=[Probe()], verbose=0)
        return outcome(probe, history, main=main.get_weights())

    both(script)


@feature
def shuffles_that_were_iterated_by_hand() -> None:
    """Batches that were looked at, layers that were adapted; in a graph that is rewritten whole, too."""
    fresh()  # over TensorFlow's collectives devices get other names: limits.md
    x, y = rows("even")
    half = len(x) // 2

    def part(number: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).skip(number * half).take(half)

    def shuffled(kind: str) -> tf.data.Dataset:
        if kind in ("interleaved", "in parallel"):
            calls = {"num_parallel_calls": 1, "deterministic": True} if kind == "in parallel" else {}
            parts = tf.data.Dataset.range(2).shuffle(2, seed=1).shuffle(2, seed=4)
            data = parts.interleave(part, cycle_length=1, **calls)
        else:
            data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shuffle(len(x), seed=2)
        if kind == "paired":  # two orders of one shuffle
            data = tf.data.Dataset.zip((data, data)).map(lambda one, other: (one[0], other[1]))
        return data.batch(size() * BATCH)

    for kind in ("slices", "interleaved", "in parallel", "paired"):
        data = {"plain": shuffled(kind), "ours": shuffled(kind)}
        for each in data.values():
            for _ in each.take(1):
                pass

        def script(_: int, data: dict[str, tf.data.Dataset] = data) -> dict[str, Any]:
            given = data["ours" if tf.distribute.has_strategy() else "plain"]
            normalization = keras.layers.Normalization()
            normalization.adapt(given.map(lambda x, y: x))
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), "mse")
            logs = [model.fit(given, epochs=2, verbose=0).history["loss"]]
            if kdist.rank() == 1:  # alone
                next(iter(given))
            for _ in range(2):
                given.reduce(0, lambda count, _: count + 1)
            logs.append(model.fit(given.map(lambda x, y: (x + 1, y)), validation_data=given, verbose=0).history["loss"])
            return {"logs": logs, "mean": normalization.mean, "weights": model.get_weights()}

        both(script, scale_batch=False)


if importlib.util.find_spec("torch"):

    @feature
    def torch_data_loader() -> None:
        import torch

        x, y = rows("ragged")
        data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))

        def script(batch: int) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
            loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=False)
            return fit_evaluate_predict(model, {"x": loader}, x, y, batch)

        both(script)


if importlib.util.find_spec("grain"):

    @feature
    def grain_datasets() -> None:
        """A shuffled one, one that is iterated, a loader."""
        import grain

        x, y = rows("ragged")
        samples = list(zip(x, y, strict=True))

        def mapped(batch: int) -> Any:
            return grain.MapDataset.source(samples).shuffle(seed=3).batch(batch)

        def iterated(batch: int) -> Any:
            return mapped(batch).to_iter_dataset()

        def loaded(batch: int) -> Any:
            sampler = grain.samplers.IndexSampler(len(x), num_epochs=1, shuffle=True, seed=3)
            return grain.DataLoader(
                data_source=samples, sampler=sampler, operations=[grain.transforms.Batch(batch, drop_remainder=False)]
            )

        for make in (mapped, iterated, loaded):

            def script(batch: int, make: Any = make) -> dict[str, Any]:
                model = mlp()
                model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
                steps = -(-len(x) // batch)
                history = model.fit(make(batch), steps_per_epoch=steps, verbose=0)
                if make is iterated:
                    return outcome(model, history)
                data = grain.MapDataset.source(list(x)).batch(batch)
                return outcome(
                    model,
                    history,
                    evaluate=model.evaluate(make(batch), verbose=0, return_dict=True),
                    predict=model.predict(data, verbose=0),
                )

            both(script)
        with kdist.scope():  # a new pass in each epoch
            model = mlp()
            model.compile("sgd", "mse")
            history = model.fit(mapped(BATCH), epochs=2, verbose=0)
        assert len(history.epoch) == 2


@feature
def the_end_of_data_of_unknown_length() -> None:
    """Plain Keras finds it within a graph, which has counted the step and decayed the weights; else it has not."""
    x, y = rows("ragged")

    def finite(batch: int) -> Any:
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch]

    def script(batch: int) -> dict[str, Any]:
        found = []
        for optimizer, compiled in (
            (keras.optimizers.AdamW(0.01, weight_decay=0.3), {}),
            (keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(0.1, 20)), {"steps_per_execution": 2}),
            (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), {}),
            (keras.optimizers.Adam(0.01), {"run_eagerly": True}),
            (keras.optimizers.Adam(0.01), {"jit_compile": True}),
        ):
            model = mlp()
            model.compile(optimizer, "mse", **compiled)
            for _ in range(2):
                model.fit(finite(batch), verbose=0)
            found.append([int(model.optimizer.iterations), model.get_weights()])
        return {"found": found}

    both(script)
