"""Gradient accumulation, buckets and sparse gradients: which messages carry the gradients."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.strategies.ordered_sums import ordered_sums
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fresh,
    mlp,
    outcome,
    rows,
    sequence_model,
    sequences,
    size,
)


@feature
def gradients_in_several_messages() -> None:
    """The same sums, a message for each layer or two; sparse gradients and statistics among them."""
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    def messages(bucket_mb: float | None) -> int:
        """Returns how many a step sends, as it is traced; one more is for rates that some rank asks for."""
        engine, sent = open_engine(kdist.cluster_info()), -1
        fresh()
        with kdist.scope(kdist.AllReduce(bucket_mb=bucket_mb), scale_lr=None):
            model = mlp()
            model.compile("sgd", "mse")
            allreduce = engine.allreduce

            def counted(tensors: Any) -> Any:
                nonlocal sent
                sent += not tf.executing_eagerly()
                return allreduce(tensors)

            engine.__dict__["allreduce"] = counted
            try:
                model.fit(*rows("even"), batch_size=BATCH, verbose=0)
            finally:
                del engine.__dict__["allreduce"]
        return sent

    assert messages(None) == 1
    assert messages(1e-6) == len(mlp().trainable_variables)
    both(script, strategy=kdist.AllReduce(bucket_mb=1e-4), rtol=1e-9 if keras.__version__ >= "3.13" else 1e-6)
    simple(lambda: {"run_eagerly": True}, scope={"strategy": kdist.AllReduce(bucket_mb=1e-4)})


@feature
def sparse_gradients_as_dense_ones() -> None:
    x, y = sequences()
    applied: set[tuple[bool, bool]] = set()  # in the scope or not, slices or not

    class Noting(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            applied.add((tf.distribute.has_strategy(), any(isinstance(each, tf.IndexedSlices) for each in grads)))
            return super().apply(grads, trainable_variables)

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(Noting(0.1, momentum=0.9), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    rtol = 1e-9 if keras.__version__ >= "3.13" else 1e-6  # Keras before adds an epsilon to the count of unmasked steps
    both(script, rtol=rtol, strategy=kdist.AllReduce(sparse_as_dense=True))
    assert applied == {(True, False)} | ({(False, True)} if kdist.is_chief() else set())  # who trains plainly, too


@feature
def rows_of_one_index() -> None:
    """No kernel adds up two rows of one index to a variable: with several threads, or on a GPU, their order varies."""
    graphs: list[tf.Graph] = []

    def noted() -> contextlib.AbstractContextManager[None]:
        graphs.append(tf.compat.v1.get_default_graph())
        return ordered_sums()

    for optimizer in (lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), lambda: keras.optimizers.SGD(0.1)):

        def script(batch: int) -> dict[str, Any]:
            model = sequence_model()
            model.compile(optimizer(), "mse")  # noqa: B023
            return fit_alone(model, fed("arrays", sequences(), batch))

        with mock.patch("kdist.strategies.all_reduce.ordered_sums", noted):
            both(script)
    assert graphs
    for graph in graphs:
        for op in graph.get_operations():
            if op.type == "UnsortedSegmentSum" or "Scatter" in op.type:
                assert op.device.endswith("CPU:0") or op.inputs[1].op.type == "Unique", op


@feature
def gradient_accumulation() -> None:
    simple(lambda: {"optimizer": keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)})


class AccumulatorsOfEachStep(keras.callbacks.Callback):
    """Looks between two steps, as any callback may whose methods are called there."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.found: list[list[Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append([np.asarray(v) for v in self.model.optimizer.variables if "accumulator" in v.path])


class Rows(keras.layers.Layer):
    """A table whose gradients are sparse, as those of `keras.layers.Embedding`, which is known to have them."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(9, 4))

    def call(self, numbers: Any) -> Any:
        return tf.gather(self.table.value, tf.cast(numbers, tf.int64))


@feature
def gradients_travel_with_their_update() -> None:
    """Epochs end between two updates; one layer has sparse gradients, another statistics; calls take turns."""
    x, y = sequences()
    whole = size() * BATCH

    def script(batch: int) -> dict[str, Any]:
        norm = keras.layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((6,), dtype="int64"), Rows(), norm, keras.layers.Dense(1)])
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, global_clipnorm=0.1), "mse")
        data, looking, found = fed("arrays", (x, y), batch), AccumulatorsOfEachStep(), []
        for callbacks in ([], [looking], [keras.callbacks.ReduceLROnPlateau("loss")]):
            found.append(outcome(model, model.fit(**data, epochs=3, verbose=0, callbacks=callbacks)))
            model.train_on_batch(x[:whole], y[:whole])
            found.append(outcome(model))
        return {"found": found, "looking": looking.found}

    both(script)


@feature
def accumulated_sums_are_whole_after_all_that_may_happen() -> None:
    x, y = rows("ragged")
    whole = size() * BATCH
    engine = open_engine(kdist.cluster_info())
    folder = engine.broadcast_object(tempfile.mkdtemp() if engine.rank == 0 else None)

    class Breaking(keras.Model):
        """Raises in its fifth step, on all ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = mlp(), 0

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        def train_step(self, data: Any) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise ValueError("in the fifth step")
            return super().train_step(data)

    def compiled(model: keras.Model, **options: Any) -> keras.Model:
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse", **options)
        return model

    def an_own_loop(batch: int) -> dict[str, Any]:
        model = compiled(mlp())
        model.fit(**fed("arrays", (x, y), batch), verbose=0)
        step = tf.function(lambda data: tf.distribute.get_strategy().run(model.train_step, args=(data,)))
        for _ in range(4):
            step((tf.constant(x[:whole]), tf.constant(y[:whole])))
        return outcome(model)

    def an_error_that_is_caught(batch: int) -> dict[str, Any]:
        model = compiled(Breaking(), run_eagerly=True)
        model.train_on_batch(x[:whole], y[:whole])
        with pytest.raises(ValueError, match="in the fifth step"):
            model.fit(**fed("arrays", (x, y), batch), epochs=9, verbose=0)
        for _ in range(4):
            model.train_on_batch(x[:whole], y[:whole])
        return outcome(model)

    def a_load_on_one_rank(batch: int) -> dict[str, Any]:
        model = compiled(mlp())
        model.fit(**fed("arrays", (x, y), batch), verbose=0)
        file = f"{folder}/{batch}.weights.h5"
        model.save_weights(file)
        loading = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.load_weights(file))
        loads = batch == whole or engine.rank == 1  # plainly, and on one of the ranks
        return outcome(
            model,
            model.fit(**fed("arrays", (x, y), batch), epochs=2, verbose=0, callbacks=[loading] if loads else []),
        )

    def a_fit_within_a_fit(batch: int) -> dict[str, Any]:
        model, looking = compiled(mlp()), AccumulatorsOfEachStep()
        data = fed("arrays", (x, y), batch)
        again = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.fit(**data, verbose=0))
        model.fit(**data, epochs=2, verbose=0, callbacks=[looking, again])
        return outcome(model, looking=looking.found)

    for script in (an_own_loop, an_error_that_is_caught, a_load_on_one_rank, a_fit_within_a_fit):
        print(script.__name__, flush=True)
        both(script)


@feature
def gradients_travel_in_each_step_if_someone_looks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saving = functools.partial(keras.callbacks.ModelCheckpoint, f"{folder}/model.keras")
        for callbacks, expected in (
            ([], 2),
            ([kdist.callbacks.Throughput(), kdist.callbacks.ChiefOnly(saving())], 2),
            ([keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)], 7),
            ([saving(save_freq=10**9)], 7),
            # On one rank only: all must do the same.
            ([keras.callbacks.TerminateOnNaN()] if open_engine(kdist.cluster_info()).rank == 1 else [], 7),
        ):
            assert messages_of_gradients(callbacks) == expected, callbacks


def messages_of_gradients(callbacks: list[Any]) -> int:
    """Returns how many messages the gradients of 7 steps are sent in, 3 steps an update."""
    engine = open_engine(kdist.cluster_info())
    allreduce, sent = engine.allreduce, []

    def noted(tensors: Any) -> Any:
        if not tf.executing_eagerly() and sum(each.shape.rank == 2 for each in tensors) == 2:  # the kernels
            tf.py_function(lambda: sent.append(1), [], [])
        return allreduce(tensors)

    fresh()
    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
        engine.__dict__["allreduce"] = noted
        try:
            x, y = np.ones((7 * BATCH * size(), 5)), np.ones((7 * BATCH * size(), 2))
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        finally:
            del engine.__dict__["allreduce"]
    return len(sent)


@contextlib.contextmanager
def messages_of_python() -> Iterator[list[str]]:
    """Yields a list to which each collective is added that Python sends, and no graph."""
    engine, sent = open_engine(kdist.cluster_info()), []
    kinds = ("allreduce", "allgather", "broadcast", "barrier", "gather_objects", "sum_numbers")

    def noted(kind: str) -> Any:
        method = getattr(engine, kind)

        def send(*args: Any, **kwargs: Any) -> Any:
            before = len(sent)
            result = method(*args, **kwargs)
            is_sent = kind in ("barrier", "gather_objects") or args[0]  # of no tensors nothing is
            if tf.executing_eagerly() and is_sent:
                sent[before:] = [kind]  # of some engines one calls another
            return result

        return send

    engine.__dict__.update({kind: noted(kind) for kind in kinds})
    try:
        yield sent
    finally:
        for kind in kinds:
            del engine.__dict__[kind]


@feature
def calls_send_few_messages_beside_their_steps() -> None:
    """Of a model with statistics, metrics and a scaled learning rate; the first call of each is not counted."""
    x, y = np.ones((4 * BATCH * size(), 5)), np.ones((4 * BATCH * size(), 2))
    fresh()
    with kdist.scope():
        layers = [keras.Input((5,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        counts = {}
        for name, call in {
            "fit": lambda: model.fit(dataset, verbose=0),
            "fit of two epochs": lambda: model.fit(dataset, epochs=2, verbose=0),
            "evaluate": lambda: model.evaluate(dataset, verbose=0),
            "predict": lambda: model.predict(dataset, verbose=0),
            "train_on_batch": lambda: model.train_on_batch(x, y),
            "test_on_batch": lambda: model.test_on_batch(x, y),
            "predict_on_batch": lambda: model.predict_on_batch(x),
        }.items():
            call()
            with messages_of_python() as sent:
                call()
            counts[name] = len(sent)
    expected = {"fit": 12, "fit of two epochs": 17, "evaluate": 5, "predict": 4, "train_on_batch": 1}
    assert counts == {**expected, "test_on_batch": 1, "predict_on_batch": 1}


@feature
def gradients_added_up_by_hand() -> None:
    """As in many a script: variables for the sums, and an update in a branch; statistics are merged in each step."""
    x, y = rows("ragged")

    class Seen(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, inputs: Any) -> Any:
            self.mean.assign(keras.ops.mean(inputs, axis=0))
            return inputs

    class AddsUp(keras.Model):
        def __init__(self, period: int) -> None:
            inputs = keras.Input((5,))
            super().__init__(inputs, keras.layers.Dense(2)(Seen()(inputs)))
            deterministic_weights(self)
            self.period = period
            made = {"initializer": "zeros", "trainable": False}
            self.sums = [self.add_weight(shape=v.shape, dtype=v.dtype, **made) for v in self.trainable_variables]
            self.count = self.add_weight(shape=(), dtype="int32", **made)

        def train_step(self, data: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weight)
            is_first = tf.equal(self.count % self.period, 0)
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
                total.assign(tf.where(is_first, tf.zeros_like(gradient), total) + gradient / self.period)
            self.count.assign_add(1)

            def update() -> None:
                self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))

            tf.cond(tf.equal(self.count % self.period, 0), update, lambda: None)
            return {"loss": loss}

    for period in (2, 3):

        def script(batch: int, period: int = period) -> dict[str, Any]:
            model = AddsUp(period)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            # A whole number of updates, and a step beyond.
            steps = (2 * period + 1) * (size() if batch == BATCH else 1)
            data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch)
            model.fit(data, steps_per_epoch=steps, verbose=0)
            return {"weights": [np.asarray(v) for v in model.weights]}

        both(script)
