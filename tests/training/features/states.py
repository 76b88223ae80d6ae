"""State that a step writes beside weights: counters, averages, queues, wherever it is kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.engines.single import SingleEngine
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    OwnStep,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fresh,
    outcome,
    rows,
    sequences,
    size,
)


def num_rows(inputs: Any, dtype: str = "int64") -> Any:
    return keras.ops.cast(keras.ops.shape(inputs)[0], dtype)


class Holder:
    """An object that Keras does not look into."""

    def __init__(self) -> None:
        self.rows = keras.Variable(0, dtype="int32", trainable=False)
        self.trainable_by_default = keras.Variable(0, dtype="int64")


class Counters(keras.layers.Layer):
    """Counts rows and steps, in all kinds of variables."""

    def __init__(self, always: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.always = always
        self.holder = Holder()
        self.raw = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.raw_steps = tf.Variable(0, trainable=False)
        self.by_shape = tf.Variable(0, dtype=tf.int64, trainable=False)

    def build(self, shape: Any) -> None:
        def zeros(dtype: str = "int64", shape: Any = (), **kwargs: Any) -> Any:
            return self.add_weight(shape=shape, dtype=dtype, trainable=False, initializer="zeros", **kwargs)

        self.seen, self.small, self.signs = zeros(name="seen"), zeros("int16"), zeros("int32", (2,))
        self.declared = zeros(aggregation="sum", name="declared")
        self.share = zeros("float64", aggregation="sum", name="share")
        self.steps, self.float_steps, self.after_warmup = zeros("int32"), zeros("float64"), zeros("int32")
        self.steps_in_a_vector = zeros("int32", (1,))

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training or self.always:
            ops, number = keras.ops, num_rows(inputs)
            self.seen.assign_add(number)
            self.small.assign(self.small + ops.cast(ops.shape(inputs)[0], "int16"))
            self.signs.assign_add(ops.bincount(ops.cast(inputs[:, 0] > 0, "int32"), minlength=2))
            self.declared.assign_add(number)
            self.share.assign_add(ops.cast(ops.sum(inputs), "float64"))
            self.holder.rows.assign_add(num_rows(inputs, "int32"))
            self.holder.trainable_by_default.assign_add(2 * number)
            self.raw.assign_add(number)
            self.by_shape.assign_add(tf.shape(inputs, tf.int64)[0])
            self.steps.assign_add(1)
            self.steps_in_a_vector.assign_add([1])
            self.float_steps.assign_add(1.0)
            self.raw_steps.assign_add(1)
            tf.cond(self.steps > 1, lambda: self.after_warmup.assign_add(1), lambda: tf.constant(0))
        return inputs

    def counts(self) -> list[Any]:
        kept = [self.holder.rows, self.holder.trainable_by_default, self.raw, self.by_shape]
        kept += [self.raw_steps, *self.weights]
        return [np.asarray(each) for each in kept]


def counting(**kwargs: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), Counters(**kwargs), keras.layers.Dense(2)])
    deterministic_weights(model)
    return model


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Gives the warnings of all ranks that are about a variable; they are there when the context is left."""
    with logged() as said:
        found: list[str] = []
        yield found
    said = [each for each in said if "the step " in each or "differs between" in each]
    everyone = open_engine(kdist.cluster_info()).gather_objects(said)
    found += [each for one in everyone for each in one]


def assert_equal_everywhere(value: Any) -> None:
    everyone = open_engine(kdist.cluster_info()).gather_objects(np.asarray(value).tolist())
    assert all(each == everyone[0] for each in everyone), everyone


@feature
def counters_need_no_aggregation() -> None:
    """Integers: rows are counted on all ranks, steps once, in whatever variable and data."""

    def script(shape: str, kind: str, **compiled: Any) -> Callable[[int], dict[str, Any]]:
        x, y = rows(shape)

        def run(batch: int) -> dict[str, Any]:
            model = counting()
            model.compile("sgd", "mse", **compiled)
            return {**fit_alone(model, fed(kind, (x, y), batch)), "counts": model.layers[0].counts()}

        return run

    with warned() as said:
        both(script("ragged", "arrays"))
        both(script("even", "arrays"))  # in whose graph the number of rows is a constant
        both(script("few", "tf_data"))
        both(script("ragged", "generator", jit_compile=True))
        both(script("one short", "py_dataset"), strategy=kdist.AllReduce(bucket_mb=1e-6))
    assert not said, said


@feature
def counters_of_steps_of_static_shape() -> None:
    """Of batches of which each rank has its own number of rows, 1 on some."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = counting()
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
        model.fit(data, epochs=2, verbose=0)
        return {"counts": model.layers[0].counts()}

    both(script)

    def splitting(batch: int) -> dict[str, Any]:
        model = counting()
        model.compile("sgd", "mse")
        model.fit(x[: 2 * size() + 2], y[: 2 * size() + 2], batch_size=size() + 1, verbose=0, shuffle=False)
        return {"counts": model.layers[0].counts()}

    both(splitting, scale_batch=False)


@feature
def counters_in_eager_steps() -> None:
    """The graph cannot tell what depends on the rows there: so it is said, once, of those without an aggregation."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = counting()
        model.compile("sgd", "mse", run_eagerly=True)
        return {**fit_alone(model, fed("arrays", (x, y), batch)), "counts": model.layers[0].counts()}

    with warned() as said:
        both(script)
    told = [each for each in said if "/seen'" in each]
    assert len(told) == 1, said
    assert not [each for each in said if "/declared'" in each or "/share'" in each], said
    for way in ("aggregation", "kdist.all_gather", 'synchronization="on_read"'):
        assert way in told[0], told


@feature
def state_that_one_rank_alone_writes_in_an_eager_step() -> None:
    """A branch in Python asks for the rows: each rank takes its own, and all must send alike."""
    x, y = rows("ragged")

    class Watch(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            settings: dict[str, Any] = {"trainable": False, "initializer": "zeros", "aggregation": "sum"}
            self.num_large = self.add_weight(shape=(), dtype="int64", **settings)
            self.total = self.add_weight(shape=(), **settings)
            self.of_class = [self.add_weight(shape=(), dtype="int64", **settings) for _ in range(4)]
            settings["aggregation"] = "only_first_replica"
            self.num_steps = self.add_weight(shape=(), dtype="int64", **settings)

        def call(self, inputs: Any, training: bool = False) -> Any:
            large = np.asarray(inputs)[:, 0] >= np.max(x[:, 0])
            if training and large.any():
                self.num_large.assign_add(int(large.sum()))
                self.total.assign_add(float(np.asarray(inputs)[large].sum()))
            if training:
                self.num_steps.assign_add(1)
                classes = (np.abs(np.asarray(inputs)[:, 0]) * 100).astype(int) % 4
                for number in dict.fromkeys(classes):  # each rank in an order of its own
                    self.of_class[number].assign_add(int((classes == number).sum()))
            return inputs

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Watch(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        return fit_alone(model, fed("arrays", (x, y), batch))

    x, y = (each[: 2 * BATCH * size() + 1] for each in (x, y))  # one rank has the last row
    both(script)


@feature
def counters_in_frozen_layers() -> None:
    """In a layer that is not trained, and in a frozen part of a model."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        frozen = counting()
        frozen.trainable = False
        layer = Counters(always=True, trainable=False)
        model = keras.Sequential([keras.Input((5,)), layer, frozen, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse")
        result = fit_alone(model, fed("arrays", (x, y), batch), steps_per_epoch=None)
        return {**result, "counts": [layer.counts(), frozen.layers[0].counts()]}

    both(script)


@feature
def counters_in_evaluations_and_predictions() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model, found = counting(always=True), []
        model.compile("sgd", "mse", steps_per_execution=2)
        model.evaluate(x, y, batch_size=batch, verbose=0)
        found.append(model.layers[0].counts())
        model.predict(x, batch_size=batch, verbose=0)
        found.append(model.layers[0].counts())
        model.fit(x, y, batch_size=batch, verbose=0, validation_data=(x[:7], y[:7]), shuffle=False)
        model.test_on_batch(x[:5], y[:5])
        model.predict_on_batch(x[:5])
        model.train_on_batch(x[:5], y[:5])
        return {"found": found, "counts": model.layers[0].counts()}

    both(script)


@feature
def counters_where_ranks_have_shapes_of_their_own() -> None:
    """In predictions and steps on a batch, numbers of rows are constants: 1 on some ranks, others on others."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = counting(always=True)
        model.compile("sgd", "mse")
        model.predict(tf.data.Dataset.from_tensor_slices(x).batch(batch), verbose=0, steps=None)
        for number in (size() + 1, 2 * size() + 1, 2 * size() - 1):
            model.predict_on_batch(x[:number])
            model.test_on_batch(x[:number], y[:number])
            model.train_on_batch(x[:number], y[:number])
        return {"counts": model.layers[0].counts()}

    both(script)


class Keeps(keras.layers.Layer):
    """Keeps something of each batch, as `update` says."""

    def __init__(
        self,
        update: Callable[[Any, Any], Any],
        shape: Any,
        dtype: str = "float64",
        in_branch: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.update, self.kept_shape, self.kept_dtype, self.in_branch = update, shape, dtype, in_branch

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(
            shape=self.kept_shape, dtype=self.kept_dtype, trainable=False, initializer="zeros", name="kept"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        def keep() -> None:
            self.kept.assign(self.update(self.kept.value, inputs))

        if training and self.in_branch:
            tf.cond(keras.ops.any(inputs < 1e9), keep, lambda: None)
        elif training:
            keep()
        return inputs


def summed(value: Any) -> Any:
    """What `kdist.all_reduce` does: the sum over the ranks."""
    return tf.distribute.get_replica_context().all_reduce("sum", value)


KEPT: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "maximum": (lambda kept, x: keras.ops.maximum(kept, keras.ops.max(x, axis=0)), (5,), "float64"),
    "codebook": (lambda kept, x: 0.9 * kept + 0.1 * keras.ops.sum(x, axis=0), (5,), "float64"),
    "queue": (lambda kept, x: keras.ops.concatenate([kept[1:], x[:1]]), (4, 5), "float64"),
    "labels": (
        lambda kept, x: keras.ops.concatenate([kept[1:], keras.ops.cast(x[:1, 0] * 100, "int32")]),
        (4,),
        "int32",
    ),
    "median": (lambda kept, x: 0.9 * kept + 0.1 * keras.ops.median(x, axis=0), (5,), "float64"),
    "flag": (lambda kept, x: keras.ops.logical_or(kept, keras.ops.any(x > 2.5)), (), "bool"),
}


class Codebook(keras.layers.Layer):
    """The codes of a VQ-VAE: moving sums and counts of the rows that are nearest to each; read when just written."""

    def build(self, shape: Any) -> None:
        start = np.random.default_rng(4).normal(size=(3, 5))
        names = (("codes", (3, 5)), ("sums", (3, 5)), ("counts", (3,)))
        self.codes, self.sums, self.counts = (
            self.add_weight(shape=shape, trainable=False, initializer="ones", name=name) for name, shape in names
        )
        self.codes.assign(start)

    def call(self, inputs: Any, training: bool = False) -> Any:
        distances = keras.ops.sum((inputs[:, None] - self.codes[None]) ** 2, axis=-1)
        nearest = keras.ops.one_hot(keras.ops.argmin(distances, axis=1), 3, dtype=inputs.dtype)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * keras.ops.sum(nearest, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * keras.ops.matmul(keras.ops.transpose(nearest), inputs))
            self.codes.assign(self.sums / self.counts[:, None])
        return keras.ops.matmul(nearest, self.codes)


@feature
def what_a_layer_keeps_is_that_of_the_global_batch() -> None:
    """Maxima, sums that decay, medians, queues, labels, flags, codebooks; also of a frozen part."""
    for shape in ("ragged", "even"):
        x, y = rows(shape)

        def script(batch: int, data: Any = (x, y)) -> dict[str, Any]:
            kept = [Keeps(*arguments[:2], dtype=arguments[2], name=name) for name, arguments in KEPT.items()]
            inner = keras.Sequential([keras.Input((5,)), *kept, Codebook(name="vq")])
            inner.trainable = False
            model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2)])
            deterministic_weights(model.layers[-1])
            model.compile("sgd", "mse")
            history = model.fit(*data, batch_size=batch, epochs=2, verbose=0, shuffle=False)
            return outcome(model, history)

        with warned() as said:
            both(script)
        assert not said, said


BANKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "replaced": lambda bank, i, x: bank.scatter_update(tf.IndexedSlices(x, i)),
    "replaced_by_places": lambda bank, i, x: bank.scatter_nd_update(i[:, None], x),
    "added": lambda bank, i, x: bank.scatter_nd_add(i[:, None] // 2, x),
    "added_as_slices": lambda bank, i, x: bank.scatter_add(sparse_delta=tf.IndexedSlices(x, i // 2)),
    "largest": lambda bank, i, x: bank.scatter_max(tf.IndexedSlices(x, i // 3)),
    "averaged": lambda bank, i, x: bank.scatter_nd_update(i[:, None], 0.7 * tf.gather(bank, i) + 0.3 * x),
    "by_lists": lambda bank, i, x: bank.scatter_nd_update([[3], [4]], [[1.0] * 5, [2.0] * 5]),
    "assigned": lambda bank, i, x: bank.assign(
        value=tf.tensor_scatter_nd_update(bank, i[:, None], 0.5 * tf.gather(bank, i) + x)
    ),
    "first_labels": lambda bank, i, x: bank.scatter_update(tf.IndexedSlices(tf.cast(x[:, :1] * 100, bank.dtype), i)),
}


class Banks(keras.layers.Layer):
    """What is kept of each sample, written by its index, which is the first column; used when just written."""

    def build(self, shape: Any) -> None:
        self.banks = {
            name: self.add_weight(
                shape=(40, 1 if "labels" in name else shape[1]),
                dtype="int32" if "labels" in name else None,
                initializer="zeros",
                trainable=False,
                name=name,
            )
            for name in BANKS
        }

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        i = tf.cast(inputs[:, 0], tf.int64)
        for name, write in BANKS.items():
            write(self.banks[name].value, i, inputs)
        return inputs + 0.1 * tf.gather(self.banks["averaged"].value, i)


@feature
def banks_of_samples_are_those_of_the_global_batch() -> None:
    """As of early-learning regularization, temporal ensembling, memories: by the methods that write some rows."""
    for shape in ("ragged", "even"):
        x, y = rows(shape)
        x[:, 0] = np.arange(len(x)) % 40

        def script(batch: int, data: Any = (x, y)) -> dict[str, Any]:
            model = keras.Sequential([keras.Input((5,)), Banks(), keras.layers.Dense(2)])
            deterministic_weights(model.layers[-1])
            model.compile(keras.optimizers.SGD(1e-4), "mse")
            history = model.fit(*data, batch_size=batch, epochs=2, verbose=0, shuffle=False)
            return outcome(model, history)

        with warned() as said:
            both(script)
        assert not said, said


@feature
def what_no_rule_can_merge_is_told_of() -> None:
    """In eager steps, and in branches: equal on all ranks, and one warning for each, by the chief."""
    fresh()
    x, y = rows("ragged")
    for eagerly in (False, True):
        for name, (update, shape, dtype) in KEPT.items():
            with warned() as said, kdist.scope(scale_lr=None):
                layer = Keeps(update, shape, dtype, name=name, in_branch=not eagerly)
                inner = keras.Sequential([keras.Input((5,)), layer])
                inner.trainable = name != "queue"  # a frozen part keeps things, too
                model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2)])
                model.compile("sgd", "mse", run_eagerly=eagerly)
                model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
                model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
            assert_equal_everywhere(layer.kept)
            if not (eagerly and name == "flag"):  # which may be equal on all ranks
                assert [f"{name}/kept'" in each for each in said] == [True], (eagerly, name, said)
            for way in ("aggregation", "kdist.all_gather", 'synchronization="on_read"') if said else ():
                assert way in said[0], said


@feature
def lookup_tables_that_differ_are_told_of() -> None:
    """Once, by the chief; not of one that gets the rows of all ranks."""
    fresh()
    x, y = rows("ragged")

    class Seen(keras.layers.Layer):
        def __init__(self, rows_of: Callable[[Any], Any]) -> None:
            super().__init__()
            self.rows_of = rows_of
            self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                keys = self.rows_of(tf.cast(100 * inputs[:, 0], tf.int64))
                self.table.insert(keys, tf.ones_like(keys))
            return inputs

    for rows_of in (lambda keys: keys, kdist.all_gather):
        with warned() as said, kdist.scope(scale_lr=None):
            layer = Seen(rows_of)
            model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            for _ in range(2):
                model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
            num_keys = int(layer.table.size())
        if rows_of is kdist.all_gather:
            assert not said, said
            assert_equal_everywhere(num_keys)
        else:
            assert ["lookup table" in each for each in said] == [True], said


@feature
def what_a_collective_has_computed_is_kept() -> None:
    """State of the global batch is right, is not told of, and is not sent again."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        total = summed if batch == BATCH else lambda value: value
        integers = Keeps(lambda kept, x: kept + total(num_rows(x)), (), "int64")
        floats = Keeps(lambda kept, x: 0.9 * kept + 0.1 * total(keras.ops.sum(x, axis=0)), (5,))
        model = keras.Sequential([keras.Input((5,)), integers, floats, keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    with warned() as said:
        both(script)
    assert not said, said


@feature
def a_teacher_follows_without_messages() -> None:
    """A moving average of weights (BYOL, DINO, MoCo) is equal on all ranks: it needs no message and no warning."""
    x, y = rows("ragged")

    class Taught(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = keras.layers.Dense(2, trainable=False)
            self.updates = tf.Variable(0, trainable=False)

        def build(self, shape: Any) -> None:
            self.dense.build(shape)
            self.teacher.build(shape)

        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)

            def follow() -> int:
                for follower, followed in zip(self.teacher.weights, self.dense.weights, strict=True):
                    follower.assign(0.9 * follower + 0.1 * followed)
                return 0

            self.updates.assign_add(1)
            tf.cond(self.updates % 2 == 0, follow, lambda: 0)
            return logs

    sent = [0]

    def script(batch: int) -> dict[str, Any]:
        model = Taught()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1))
        if batch == BATCH:
            engine = open_engine(kdist.cluster_info())
            allreduce = engine.allreduce

            def counted(tensors: Any) -> Any:
                sent[0] += 0 if tf.executing_eagerly() else len(tensors)
                return allreduce(tensors)

            engine.__dict__["allreduce"] = counted
        try:
            return outcome(model, model.fit(**fed("arrays", (x, y), batch), epochs=2, verbose=0))
        finally:
            if batch == BATCH:
                del engine.__dict__["allreduce"]

    with warned() as said:
        both(script)
    assert not said, said
    assert sent[0] == 4, sent  # two gradients, the votes, and a change of the rate


@feature
def a_value_of_each_rank_on_purpose() -> None:
    x, y = rows("even")

    class Local(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.last = keras.Variable(0.0, trainable=False, synchronization="on_read", dtype="float64")

        def call(self, inputs: Any) -> Any:
            self.last.assign(keras.ops.sum(inputs))
            return inputs

    fresh()
    with warned() as said, kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((5,)), Local(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[kdist.callbacks.ReplicaCheck(1)])
    everyone = open_engine(kdist.cluster_info()).gather_objects(float(model.layers[0].last))
    start = len(x) - BATCH * size() + BATCH * kdist.rank()
    np.testing.assert_allclose(everyone[kdist.rank()], x[start : start + BATCH].sum(), rtol=1e-6)
    assert not said, said


@feature
def states_of_a_stateful_rnn_are_of_its_rows() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(3 * size() * BATCH, 4, 2)), generator.normal(size=(3 * size() * BATCH, 1))

    def script(batch: int, rows_of_a_rank: int) -> dict[str, Any]:
        batch = batch // BATCH * rows_of_a_rank
        layers = [keras.layers.GRU(3, stateful=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(batch_shape=(batch, 4, 2)), *layers])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        predicted = model.predict(x, batch_size=batch, verbose=0)
        weights = [np.asarray(each) for each in model.trainable_variables]
        return {"weights": weights, "history": history.history, "predicted": predicted}

    with warned() as said:
        both(functools.partial(script, rows_of_a_rank=BATCH))
        both(functools.partial(script, rows_of_a_rank=1))
    assert not said, said


@feature
def an_average_that_is_used_before_it_is_merged() -> None:
    """A layer that normalises by what it has just written is exact; with XLA it is told of by name."""
    x, y = rows("ragged")

    class Centred(keras.layers.Layer):
        def __init__(self, mean: Callable[[Any], Any], **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.mean = mean

        def build(self, shape: Any) -> None:
            self.center = self.add_weight(shape=(5,), trainable=False, initializer="zeros", name="center")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.center.assign(0.9 * self.center + 0.1 * self.mean(inputs))
            return inputs - self.center

    def local(inputs: Any) -> Any:
        return keras.ops.mean(inputs, axis=0)

    def of_all(inputs: Any) -> Any:
        total = summed(tf.concat([tf.reduce_sum(inputs, 0), [num_rows(inputs, inputs.dtype)]], 0))
        return total[:-1] / total[-1]

    def trained(mean: Callable[[Any], Any], batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Centred(mean, name="centred"), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    fresh()
    with warned() as said, kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((5,)), Centred(local, name="centred"), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_equal_everywhere(model.layers[0].center)
    used = [each for each in said if "the step uses " in each and "centred/center'" in each]
    assert ["kdist.all_reduce" in each for each in used] == [True], said
    with warned() as said:
        both(lambda batch: trained(local, batch))
        both(lambda batch: trained(of_all if batch == BATCH else local, batch))
    assert not said, said


@feature
def synchronized_batch_normalization_behind_a_mask() -> None:
    tokens, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        layers = [
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        return fit_alone(model, fed("arrays", (tokens, y), batch))

    both(script, rtol=1e-9 if keras.__version__ >= "3.13" else 1e-6)


@feature
def what_is_written_where_no_step_sees_it() -> None:
    """By a callback on one rank: rank 0's value is kept, and told of once, of whatever dtype."""
    x, y = rows("even")

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            layer = self.model.layers[0]
            if not kdist.is_chief():
                layer.factor.assign_add([1.0, 2.0])
                layer.word.assign(b"another\xff")

    class Kept(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(2,), trainable=False, initializer="ones", name="factor")
            self.word = tf.Variable(b"word", trainable=False, name="word")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.word.assign("word")
            return inputs

    with warned() as said, kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((5,)), Kept(name="kept_here"), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Noting()])
    layer = model.layers[0]
    assert layer.factor.numpy().tolist() == [1.0, 1.0]
    assert layer.word.numpy() == b"word"
    differing = [each for each in said if "differs between the ranks" in each]
    assert ["kept_here/factor'" in each for each in differing] == [True, False], said
    assert "kept_here/word'" in differing[1], said


@feature
def what_the_rows_decide_is_merged() -> None:
    """A branch that a rank's rows choose is one in which ranks differ, whatever is written there."""
    x, y = rows("even")

    class Deciding(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            def zero(name: str, **kwargs: Any) -> Any:
                return self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name=name)

            self.large, self.rows, self.total = zero("large"), zero("rows"), zero("total")

        def call(self, inputs: Any) -> Any:
            number = tf.shape(inputs)[0]
            self.rows.assign(number)  # another variable's value is made of it
            self.total.assign_add(self.rows)
            tf.cond(tf.reduce_sum(inputs) > 0, lambda: self.large.assign(self.large + 1), lambda: tf.constant(0))
            return inputs

    with warned() as said, kdist.scope(scale_lr=None):
        model = keras.Sequential([keras.Input((5,)), Deciding(name="deciding"), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(**fed("tf_data", (x, y), BATCH), epochs=2, verbose=0)
    layer = model.layers[0]
    shares = [x[start : start + BATCH] for start in range(0, len(x), BATCH)]
    assert int(layer.total) == 2 * len(x)
    expected = 2 * sum(share.sum() > 0 for share in shares)
    assert int(layer.large) == expected
    assert_equal_everywhere(layer.rows)
    assert ["deciding/rows'" in each for each in said if "writes" in each] == [True], said


@feature
def a_batch_that_is_skipped_counts_nothing() -> None:
    """`NaNPolicy("skip")` undoes what all ranks have written in the step."""
    x, y = (np.concatenate([each, each]) for each in rows("even"))
    x[size() * BATCH + 1] = np.nan

    def script(batch: int) -> dict[str, Any]:
        model = counting()
        model.compile("sgd", "mse")
        engine = None if batch == BATCH else SingleEngine()
        model.fit(
            x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[kdist.callbacks.NaNPolicy("skip", engine)]
        )
        return {"weights": [np.asarray(each) for each in model.weights]}

    both(script)


@feature
def counters_of_ranks_that_train_by_themselves() -> None:
    """With `sync_every` ranks count by themselves, and their counts are added with the averages."""
    x, y = (np.concatenate([each, each]) for each in rows("ragged"))

    def script(batch: int) -> dict[str, Any]:
        model = counting()
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return {"counts": model.layers[0].counts()}

    both(script, strategy=kdist.AllReduce(sync_every=2))
