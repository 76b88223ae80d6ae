"""Strategies of TensorFlow's own that a scope passes through: run by themselves, on two logical devices of one CPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

import kdist
from kdist.callbacks import LearningRateWarmup
from kdist.errors import ScopeError, StrategyError
from tests.helpers.logs import logged

ROWS, BATCH = 40, 4


def two_devices() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 5))
    return x, x @ np.ones((5, 2))


class Batches(keras.utils.PyDataset):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def __len__(self) -> int:
        return ROWS // self.batch

    def __getitem__(self, index: int) -> Any:
        return tuple(each[index * self.batch : (index + 1) * self.batch] for each in rows())


class Widths(keras.utils.PyDataset):
    """Sequences, of which each batch is padded to its own length."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return np.ones((2, 1 + index, 1)), np.ones((2, 1))


def generator(batch: int) -> Iterator[Any]:
    while True:
        yield from (Batches(batch)[index] for index in range(ROWS // batch))


def dense(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    values = np.random.default_rng(1)
    model.set_weights([values.normal(size=weight.shape) for weight in model.get_weights()])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def trained(
    optimizer: keras.optimizers.Optimizer, batch: int, kind: str = "arrays", callbacks: Any = None
) -> tuple[list[Any], Any]:
    model = dense(optimizer)
    data: dict[str, dict[str, Any]] = {
        "arrays": {"x": rows()[0], "y": rows()[1], "batch_size": batch},
        "tf_data": {"x": tf.data.Dataset.from_tensor_slices(rows()).batch(batch)},
        "py_dataset": {"x": Batches(batch)},
        "generator": {"x": generator(batch), "steps_per_epoch": ROWS // batch},
    }
    history = model.fit(**data[kind], epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights(), history.history


def same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    for name in ("loss", "mae"):
        np.testing.assert_allclose(one[1][name], other[1][name], rtol=1e-9)


def mirrored() -> None:
    two_devices()
    keras.config.set_floatx("float64")
    sgd = keras.optimizers.SGD
    for kind in ("arrays", "tf_data", "py_dataset"):
        plain = trained(sgd(0.1, momentum=0.9), 2 * BATCH)
        with kdist.scope("mirrored", scale_lr=None) as strategy:
            assert strategy.num_replicas_in_sync == 2
            same(trained(sgd(0.1, momentum=0.9), BATCH, kind), plain)

    plain = trained(sgd(0.2), 2 * BATCH)
    with kdist.scope("mirrored", warmup_epochs=0):
        ours = trained(sgd(0.1), BATCH)
    same(ours, plain)
    np.testing.assert_allclose(ours[1]["effective_learning_rate"], 0.2, rtol=1e-6)

    read: list[float] = []
    as_it_is = keras.callbacks.LearningRateScheduler(lambda epoch, rate: read.append(rate) or rate)
    with kdist.scope("mirrored", warmup_epochs=0):  # who reads the rate and sets it does not scale it once more
        same(trained(sgd(0.1), BATCH, callbacks=[as_it_is]), plain)
        assert read == pytest.approx([0.1, 0.1])
    decaying = functools.partial(keras.optimizers.AdamW, weight_decay=0.1)
    plain = trained(decaying(0.02), 2 * BATCH)
    with kdist.scope("mirrored", scale_lr=2.0, warmup_epochs=0):  # weights decay at the scaled rate, too
        same(trained(decaying(0.01), BATCH), plain)
    step = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.01])  # read at each second of one process
    plain = trained(sgd(keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])), 2 * BATCH)
    with kdist.scope("mirrored", scale_lr=1.0):
        same(trained(sgd(step), BATCH), plain)

    with kdist.scope("mirrored", warmup_epochs=0):  # the batch of `train_on_batch` is not scaled, before `fit` or after
        alone, fitted = (dense(sgd(0.1)) for _ in range(2))
        fitted.fit(*rows(), batch_size=BATCH, verbose=0)
        fitted.set_weights(alone.get_weights())
        for model in (alone, fitted):
            model.train_on_batch(*(each[:BATCH] for each in rows()))
        for a, b in zip(alone.get_weights(), fitted.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)

    _resumed_in_the_warmup()

    with kdist.scope("mirrored", scale_batch=False):
        same(trained(sgd(0.1), BATCH), trained(sgd(0.1), BATCH))

    with kdist.scope("mirrored"):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        callbacks = kdist.callbacks
        for looking in (callbacks.NaNPolicy(), callbacks.ReplicaCheck(), callbacks.Throughput(), LearningRateWarmup(2)):
            with pytest.raises(ScopeError, match=f"{type(looking).__name__} changes the training step"):
                model.fit(*rows(), batch_size=BATCH, verbose=0, callbacks=[looking])

    with kdist.scope("mirrored"):  # sequences of several lengths, padded: dense they were
        model = keras.Sequential([keras.Input((None, 1)), keras.layers.LSTM(2), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        lengths = tf.data.Dataset.range(12).map(lambda n: (tf.ones([1 + n, 1]), tf.ones([1])))
        given = keras.callbacks.CallbackList(model=model, epochs=1, add_history=True)
        for _ in range(2):
            history = model.fit(lengths.padded_batch(2, ([None, 1], [1])), callbacks=given, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        model.fit(Widths(), verbose=0)
        assert len(given.callbacks) == 2

    with logged() as said, kdist.scope("mirrored"):
        _, history = trained(sgd(0.1, clipnorm=1.0), BATCH, "generator")
        model.fit(lengths.padded_batch(2, ([None, 1], [1])).repeat(), steps_per_epoch=3, verbose=0)
    assert any("steps_per_epoch=3 is no multiple" in line and "takes 4" in line for line in said), said
    assert len(history["loss"]) == 2
    assert any("batches of a generator ahead" in line for line in said), said
    assert any("clipnorm of SGD clips each replica's own gradients" in line for line in said), said
    _batches_that_do_not_grow()
    _two_of_three_optimizers()


def _batches_that_do_not_grow() -> None:
    """Of data that Keras reads by itself: neither the rate nor a schedule is scaled."""
    import grain

    decaying = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    plain = {rate: trained(keras.optimizers.SGD(rate), BATCH) for rate in (0.1, decaying)}
    with kdist.scope("mirrored") as strategy:
        per_replica = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH))
        loader = grain.DataLoader(
            data_source=Pairs(),
            sampler=grain.samplers.SequentialSampler(ROWS, grain.sharding.NoSharding()),
            operations=[grain.transforms.Batch(BATCH)],
        )
        pairs = grain.MapDataset.source(Pairs()).batch(BATCH)
        adapter = ArrayDataAdapter(*rows(), batch_size=BATCH)
        # With data of unknown length TensorFlow counts an empty step in each epoch.
        for data, rate in ((per_replica, decaying), (adapter, decaying), (loader, 0.1), (pairs, 0.1)):
            with logged() as said:
                model = dense(keras.optimizers.SGD(rate))
                history = model.fit(data, epochs=2, verbose=0).history
            same((model.get_weights(), history), plain[rate])
            assert "effective_learning_rate" not in history
            assert f"batch: each of yours / {strategy.num_replicas_in_sync} replicas" in said, said
            assert any(f"each batch of a {type(data).__name__} is split" in line for line in said), said


class Pairs:
    """Rows, as Grain's sources have them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return tuple(each[index] for each in rows())


def _two_of_three_optimizers() -> None:
    """As of a GAN, whose `compile` makes an optimizer that no step uses."""

    class Adversarial(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers_of_each = [keras.layers.Dense(2), keras.layers.Dense(2)]
            for layer in self.layers_of_each:
                layer.build((None, 5))
            self.built = True

        def compile(self, *optimizers: Any) -> None:
            super().compile()
            self.first, self.second = optimizers
            for optimizer, layer in zip(optimizers, self.layers_of_each, strict=True):
                optimizer.build(layer.trainable_variables)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for optimizer, layer in zip((self.first, self.second), self.layers_of_each, strict=True):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((layer(x) - y) ** 2)
                weights = layer.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    with logged() as said, kdist.scope("mirrored", warmup_epochs=0):
        model = Adversarial()
        model.compile(keras.optimizers.SGD(0.1, name="one"), keras.optimizers.Adam(0.01, name="other"))
        for _ in range(2):
            history = model.fit(*rows(), batch_size=BATCH, verbose=0).history
    assert history["effective_learning_rate_one"] == pytest.approx([0.2])
    assert history["effective_learning_rate_other"] == pytest.approx([0.01 * 2**0.5])
    assert said.count(f"batch: {BATCH} x 2 replicas = {2 * BATCH}") == 1, said
    told = [line for line in said if line.startswith("learning rate of ")]
    assert [line.partition(" by")[0] for line in told] == [
        "learning rate of SGD: 0.1 x 2 = 0.2",
        "learning rate of Adam: 0.01 x 1.414 = 0.01414",
    ]


def _resumed_in_the_warmup() -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise InterruptedError

    def train(*callbacks: Any) -> tuple[list[Any], Any]:
        model = dense(keras.optimizers.SGD(0.01))
        data = tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH).filter(lambda *_: True)  # of unknown length
        history = model.fit(data, epochs=4, verbose=0, callbacks=[*callbacks])
        return model.get_weights(), history.history

    with kdist.scope("mirrored", warmup_epochs=2), tempfile.TemporaryDirectory() as folder:
        expected, backup = train(), functools.partial(kdist.callbacks.BackupAndRestore, folder, save_freq=1)
        with pytest.raises(InterruptedError):
            train(backup(), Interrupt())
        same(train(backup()), expected)


def the_users_own() -> None:
    two_devices()
    keras.config.set_floatx("float64")
    own = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    plain = trained(keras.optimizers.SGD(0.1), BATCH)
    with kdist.scope(own) as strategy:
        assert strategy is own
        assert tf.distribute.get_strategy() is own
        same(trained(keras.optimizers.SGD(0.1), BATCH), plain)
    plain = trained(keras.optimizers.SGD(0.1), 2 * BATCH)
    with kdist.scope(own, scale_lr=1.0):  # asked for
        same(trained(keras.optimizers.SGD(0.1), BATCH), plain)
    with pytest.raises(StrategyError, match=r"(?s)MultiWorkerMirroredStrategy.*Fix: use `with kdist.scope\(\):`"):
        with kdist.scope(tf.distribute.MultiWorkerMirroredStrategy()):
            pass


def tpu_calls() -> None:
    """TensorFlow's functions record that they are called; two logical devices stand for the TPU's cores."""
    two_devices()
    calls: list[Any] = []

    class Resolver:
        def __init__(self, tpu: str) -> None:
            self.tpu = tpu
            calls.append(("resolve", tpu))

        def master(self) -> str:
            return f"grpc://{self.tpu}"

    def recording(name: str) -> Any:
        return lambda resolver: calls.append((name, resolver.tpu))

    class TPUStrategy(tf.distribute.MirroredStrategy):
        def __init__(self, resolver: Resolver) -> None:
            calls.append(("strategy", resolver.tpu))
            super().__init__(["CPU:0", "CPU:1"])

    tf.distribute.cluster_resolver.TPUClusterResolver = Resolver
    tf.config.experimental_connect_to_cluster = recording("connect")
    tf.tpu.experimental.initialize_tpu_system = recording("initialise")
    tf.distribute.TPUStrategy = TPUStrategy
    order = ["resolve", "connect", "initialise", "strategy"]
    for _ in range(2):  # once only
        with kdist.scope("tpu", scale_lr=None) as first:  # TPU_NAME names it
            assert first.num_replicas_in_sync == 2
    assert calls == [(each, "my-tpu") for each in order]
    with kdist.scope() as again:
        assert again is first
    calls.clear()
    with kdist.scope(kdist.TPU("local")):
        pass
    with kdist.scope(kdist.TPU(Resolver("given"))):
        pass
    assert calls == [*((each, "local") for each in order), *((each, "given") for each in order)]
    keras.config.set_floatx("float64")
    plain = trained(keras.optimizers.SGD(0.1), 2 * BATCH)
    with kdist.scope("tpu", scale_lr=None):
        same(trained(keras.optimizers.SGD(0.1), BATCH), plain)


def no_tpu(resolver: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words), kdist.scope(kdist.TPU(resolver, timeout=3)):
        pass
