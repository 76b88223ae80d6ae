"""Training loops of the user's own, without `fit` and without `strategy.run`; losses that are called by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, both, compare, deterministic_weights, fresh, mlp, outcome, rows, size

WAYS: dict[str, Callable[[Any], Any]] = {"eagerly": lambda f: f, "traced": tf.function}


def share(x: Any, y: Any, batch: int) -> Any:
    """Yields the batches of one process, or this rank's part of each."""
    for start in range(0, len(x), size() * BATCH):
        mine = slice(start, start + batch) if batch != BATCH else slice(start + kdist.rank() * BATCH, None)
        yield x[mine][:batch], y[mine][:batch]


def loop(model: keras.Model, optimizer: Any, batches: Any, wrap: Any, apply: Callable[..., Any] | None = None) -> Any:
    """Trains by Keras' guide to loops written from scratch; returns the losses."""
    loss_object = keras.losses.MeanSquaredError()

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True)) + sum(model.losses)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_weights)
        if apply is None:
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        else:
            apply(gradients, model.trainable_weights)
        return loss

    return [train_step(tf.constant(x), tf.constant(y)) for x, y in batches]


def trained(model: keras.Model, optimizer: Any, losses: Any = ()) -> dict[str, Any]:
    return outcome(model, losses=[float(loss) for loss in losses], slots=[np.asarray(v) for v in optimizer.variables])


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clips": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "decays": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulates": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "scales the loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
}


@feature
def a_loop_on_the_same_rows() -> None:
    x, y = rows("ragged")
    for wrap in WAYS.values():
        for make in OPTIMIZERS.values():

            def script(batch: int) -> dict[str, Any]:
                model, optimizer = mlp(kernel_regularizer="l2"), make()  # noqa: B023
                batches = [(x[at : at + 5], y[at : at + 5]) for at in range(0, len(x), 5)]
                return trained(model, optimizer, loop(model, optimizer, batches, wrap))  # noqa: B023

            both(script)


@feature
def a_loop_on_rows_of_each_rank() -> None:
    """As with Horovod: equal shares, the mean of means. What the optimizer clips is the mean."""
    x, y = rows("even")
    for wrap in WAYS.values():
        for make in OPTIMIZERS.values():

            def script(batch: int) -> dict[str, Any]:
                model, optimizer = mlp(), make()  # noqa: B023
                loop(model, optimizer, share(x, y, batch), wrap, apply=optimizer.apply)  # noqa: B023
                return trained(model, optimizer)

            both(script)


class Doubling(keras.optimizers.SGD):
    """An optimizer with an `apply` of its own, which must run once in each update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([2.0 * each for each in grads], trainable_variables)


@feature
def a_loop_with_an_optimizer_made_before_the_scope() -> None:
    x, y = rows("even")
    makers: dict[str, Callable[[], Any]] = {**OPTIMIZERS, "has its own apply": lambda: Doubling(0.1, momentum=0.9)}
    for make in makers.values():
        made: dict[int, Any] = {}
        fresh()
        for batch in (BATCH, BATCH * size()):
            made[batch] = make()

        def script(batch: int) -> dict[str, Any]:
            model, optimizer = mlp(), made[batch]  # noqa: B023
            loop(model, optimizer, share(x, y, batch), tf.function, apply=optimizer.apply)
            return trained(model, optimizer)

        both(script)


@feature
def a_loop_that_calls_the_models_own_steps() -> None:
    """In `strategy.run` on a replica's rows, the last of which some ranks have not, and without it on all rows.

    And a callback of `fit` does.
    """
    x, y = rows("ragged")

    def normed() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(synchronized=True), mlp()])
        deterministic_weights(model)
        return model

    def in_run(batch: int) -> dict[str, Any]:
        model = normed()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        strategy = tf.distribute.get_strategy()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(size() * BATCH)
        train = tf.function(lambda data: strategy.run(model.train_step, args=(data,)), reduce_retracing=True)
        for data in strategy.experimental_distribute_dataset(dataset):
            train(data)
        return outcome(model, metrics=model.get_metrics_result())

    def by_itself(batch: int) -> dict[str, Any]:
        model = normed()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        logs = [model.train_step((x[at : at + 5], y[at : at + 5])) for at in range(0, len(x), 5)]
        return outcome(model, logs=[{name: float(value) for name, value in each.items()} for each in logs])

    def in_a_callback(batch: int) -> dict[str, Any]:
        model = normed()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])

        def more(batch: int, logs: Any) -> None:
            if batch == 1:  # in the midst of a pass, whose metrics go on
                model.train_step((x[:5], y[:5]))
                model.test_step((x[:3], y[:3]))

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=more)
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        return outcome(model, history)

    for script in (in_run, by_itself, in_a_callback):
        both(script)


@feature
def a_loop_on_a_distributed_dataset() -> None:
    """The two lines that the message names."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda *row: row)
        dataset = dataset.batch(size() * BATCH, drop_remainder=True)
        shared = tf.distribute.get_strategy().experimental_distribute_dataset(dataset)
        assert len(shared) == len(dataset)
        loop(model, optimizer, shared, tf.function)
        return trained(model, optimizer)

    both(script)


@feature
def the_quickstart_for_experts() -> None:
    """https://www.tensorflow.org/tutorials/quickstart/advanced, where the model is built by the first traced step."""
    x, y = rows("even")
    labels = (y[:, 0] > 0).astype("int64")

    class MyModel(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.d1 = keras.layers.Dense(8, activation="relu")
            self.d2 = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.d2(self.d1(x))

    def script(batch: int) -> dict[str, Any]:
        train_ds = tf.data.Dataset.from_tensor_slices((x, labels)).shuffle(10000, seed=0).batch(4)
        test_ds = tf.data.Dataset.from_tensor_slices((x, labels)).batch(4)
        model = MyModel()
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam()
        train_loss = keras.metrics.Mean(name="train_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_loss = keras.metrics.Mean(name="test_loss")

        @tf.function
        def train_step(images: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                predictions = model(images, training=True)
                loss = loss_object(labels, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            train_loss(loss)
            train_accuracy(labels, predictions)

        @tf.function
        def test_step(images: Any, labels: Any) -> None:
            test_loss(loss_object(labels, model(images, training=False)))

        logs = []
        for _ in range(2):
            for metric in (train_loss, train_accuracy, test_loss):
                metric.reset_state()
            for images, given in train_ds:
                train_step(images, given)
            for images, given in test_ds:
                test_step(images, given)
            logs.append([float(m.result()) for m in (train_loss, train_accuracy, test_loss)])
        return outcome(model, logs=logs)

    both(script)


@feature
def a_loop_with_sparse_gradients() -> None:
    tokens = np.random.default_rng(0).integers(0, 7, size=(size() * BATCH * 2, 3))
    y = np.random.default_rng(1).normal(size=(len(tokens), 1))

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int64"),
                keras.layers.Embedding(7, 2),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        deterministic_weights(model)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        for wrap in WAYS.values():
            loop(model, optimizer, share(tokens, y, batch), wrap)
        return trained(model, optimizer)

    both(script)


@feature
def a_loop_with_sparse_gradients_on_the_same_rows() -> None:
    """An optimizer squares each reading of a table by itself: those of one process, not one more for each rank."""
    tokens = np.random.default_rng(0).integers(0, 7, size=(BATCH * 3, 3))
    y = np.random.default_rng(1).normal(size=(len(tokens), 1))
    for wrap in WAYS.values():
        for make in (keras.optimizers.Adam, lambda rate: keras.optimizers.RMSprop(rate, global_clipnorm=0.1)):

            def script(batch: int) -> dict[str, Any]:
                table = keras.layers.Embedding(7, 2)
                model = keras.Sequential([keras.Input((3,), dtype="int64"), table, keras.layers.Flatten()])
                model.add(keras.layers.Dense(1))
                deterministic_weights(model)
                optimizer = make(0.01)  # noqa: B023
                batches = [(tokens[at : at + 5], y[at : at + 5]) for at in range(0, len(tokens), 5)]
                return trained(model, optimizer, loop(model, optimizer, batches, wrap))  # noqa: B023

            both(script)


@feature
def a_loop_with_two_optimizers() -> None:
    """As of a GAN; one variable of each gets no gradient, as where a loss does not use it."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        one, two = mlp(), mlp()
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
        unused = keras.Variable(1.0)

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape(persistent=True) as tape:
                loss = keras.ops.mean(keras.losses.mean_squared_error(y, one(x)))
                other = keras.ops.mean(keras.losses.mean_squared_error(two(x), keras.ops.stop_gradient(one(x))))
            for model, value, optimizer in ((one, loss, optimizers[0]), (two, other, optimizers[1])):
                variables = [*model.trainable_variables, *([unused] if model is one else [])]
                optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

        for images, labels in share(x, y, batch):
            step(tf.constant(images), tf.constant(labels))
        return {**trained(one, optimizers[0]), "other": [np.asarray(v) for v in two.variables]}

    both(script)


class ClipsByItself(keras.optimizers.SGD):
    """Clips in the methods that a loop calls, before Keras' own."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(tf.clip_by_norm(g, 0.05), v) for g, v in grads_and_vars])

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([tf.clip_by_value(g, -0.04, 0.04) for g in grads], trainable_variables)


@feature
def a_loop_with_an_optimizer_that_clips_by_itself() -> None:
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model, optimizer = mlp(), ClipsByItself(0.1)
        loop(model, optimizer, share(x, y, batch), tf.function)
        loop(model, optimizer, share(x, y, batch), tf.function, apply=optimizer.apply)
        return trained(model, optimizer)

    both(script)


@feature
def a_loop_after_the_scope() -> None:
    """A model and an optimizer that were made in the scope stay distributed after it, as for `fit`."""
    x, y = rows("even")
    for wrap in WAYS.values():
        fresh()
        with kdist.scope():
            model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        loop(model, optimizer, share(x, y, BATCH), wrap)
        plain = mlp(), keras.optimizers.Adam(0.01)
        loop(*plain, share(x, y, size() * BATCH), wrap)
        compare(trained(*plain), trained(model, optimizer))


@feature
def a_loop_with_what_was_made_before_the_scope() -> None:
    """Adopted, as a model is by `fit`: rank 0's weights are those of all."""
    x, y = rows("even")
    for wrap in WAYS.values():
        fresh()
        model = mlp()
        optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))]
        plain = mlp(), [keras.optimizers.Adam(0.01), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))]
        for optimizer in plain[1]:
            loop(plain[0], optimizer, share(x, y, size() * BATCH), wrap)
        if wrap is tf.function and kdist.rank() > 0:  # an eager loop has computed its first gradients then
            model.set_weights([0 * each for each in model.get_weights()])
        with kdist.scope():
            for optimizer in optimizers:
                loop(model, optimizer, share(x, y, BATCH), wrap)
        compare(trained(plain[0], plain[1][1]), trained(model, optimizers[1]))


@feature
def a_loop_between_two_fits() -> None:
    """One optimizer in both: the update pipeline of `fit` and the loop's average do not meet."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        model.compile(optimizer, "mse")
        for _ in range(2):
            model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
            loop(model, optimizer, share(x, y, batch), tf.function)
        return trained(model, optimizer)

    both(script)


@feature
def losses_by_hand() -> None:
    """Outside of a replica a loss is what it is in one process; inside of `strategy.run` Keras divides it."""
    x, y = rows("even")
    ones, zeros = np.ones((4, 1)), np.zeros((4, 1))

    class Adds(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.sum(inputs**2))
            return inputs

    def script(batch: int) -> dict[str, Any]:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, Adds()(keras.layers.Dense(2, kernel_regularizer="l2")(inputs)))
        deterministic_weights(model)
        model.compile("sgd", keras.losses.Huber())
        values = []
        for wrap in WAYS.values():
            values += [wrap(lambda: keras.losses.MeanSquaredError()(ones, zeros))()]
            values += [wrap(lambda: keras.losses.MeanSquaredError(reduction="sum")(ones, zeros))()]
            values += [wrap(lambda: model.compute_loss(x=x, y=y, y_pred=model(x)))()]
            values += [wrap(lambda: keras.losses.BinaryCrossentropy()(ones, 0.5 * ones, sample_weight=3 * ones))()]
        metric = keras.metrics.Mean()
        metric.update_state(keras.losses.MeanAbsoluteError()(ones, zeros))
        return {"losses": [float(value) for value in values], "metric": float(metric.result())}

    both(script)
    with kdist.scope() as strategy:
        assert strategy.num_replicas_in_sync == size() == tf.distribute.get_strategy().num_replicas_in_sync
        inside = strategy.run(lambda: keras.losses.MeanSquaredError()(ones, zeros))
        np.testing.assert_allclose(float(inside), 1 / size())
    assert float(keras.losses.MeanSquaredError()(ones, zeros)) == 1.0
