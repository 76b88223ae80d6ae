"""What losses and metrics of whole batches may be given, and what they may do: strings, sparse targets, draws."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kdist
from kdist._engine import open_engine
from kdist.strategies import global_batch
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.features.whole_batches import of_rows, root
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


class Draws(keras.metrics.Metric):
    """As a metric that is estimated from a few rows."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.noise = self.add_weight(name="noise", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.reshape(ops.abs(y_true - y_pred), [-1])
        self.total.assign_add(ops.mean(tf.random.shuffle(errors)[:2]))
        self.noise.assign_add(keras.random.uniform(()))

    def result(self) -> Any:
        return self.total + self.noise


@feature
def metrics_that_draw() -> None:
    x, y = rows("ragged")
    engine = open_engine(kdist.cluster_info())
    for seed, eager in ((1, False), (1, True), (None, False)):
        fresh()
        if seed is None:
            tf.random.set_seed(None)
        else:
            keras.utils.set_random_seed(seed)
        with kdist.scope(scale_lr=None):
            model = mlp()
            model.compile("sgd", "mse", metrics=[Draws(name="draws")], run_eagerly=eager)
            model.fit(x, y, batch_size=BATCH, verbose=0)
        everyone = engine.gather_objects([float(each) for each in model.metrics_variables[-2:]])
        assert everyone == [everyone[0]] * size(), (seed, eager, everyone)


class OfNames(keras.metrics.Metric):
    """The largest error of the rows that have a name."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, names: Any, errors: Any, name: Any, is_counted: Any) -> None:
        errors = tf.where(names == name, errors, tf.zeros_like(errors))
        self.largest.assign_add(tf.where(is_counted, ops.max(errors), 0.0))

    def result(self) -> Any:
        return self.largest


@feature
def metrics_of_strings() -> None:
    x, y = rows("ragged")
    names = np.array(["", "über", "b"])[np.arange(len(x)) % 3]

    class Named(keras.Sequential):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.of_names = OfNames(name="of_names")

        def test_step(self, data: Any) -> Any:
            x, y, names = data
            errors = tf.reduce_max(tf.abs(self(x) - y), -1)
            self.of_names.update_state(names, errors, tf.constant("über"), is_counted=tf.reduce_any(names == "b"))
            return {"of_names": self.of_names.result()}

    for eager in (False, True):

        def script(batch: int, eager: bool = eager) -> dict[str, Any]:
            model = Named([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(run_eagerly=eager)
            data = tf.data.Dataset.from_tensor_slices((x, y, names)).batch(batch)
            return {"evaluate": model.evaluate(data, verbose=0, return_dict=True)}

        both(script)


@feature
def losses_of_sparse_targets() -> None:
    x, y = rows("ragged")
    sparse = tf.sparse.from_dense(np.where(y > 0, y, 0.0))

    def of_sparse(t: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean((tf.sparse.to_dense(t) - p) ** 2))

    for eager in (False, True):

        def script(batch: int, eager: bool = eager) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), of_sparse, run_eagerly=eager)
            return fit_alone(model, {"x": tf.data.Dataset.from_tensor_slices((x, sparse)).batch(batch)})

        both(script)


@feature
def temporal_classification() -> None:
    """CTC: Keras' own loss, and TensorFlow's of sparse targets."""
    tokens, _ = sequences()
    labels = np.where(np.arange(3) < 1 + np.arange(len(tokens))[:, np.newaxis] % 3, tokens[:, :1], 0)

    def of_sparse(t: Any, p: Any) -> Any:
        lengths = tf.fill([tf.shape(p)[0]], tf.shape(p)[1])
        t, p = tf.cast(t, tf.int32), tf.cast(p, tf.float32)
        return tf.nn.ctc_loss(t, p, None, lengths, logits_time_major=False, blank_index=0)

    for loss, targets in ((keras.losses.CTC(), labels), (of_sparse, tf.sparse.from_dense(labels))):

        def script(batch: int, loss: Any = loss, targets: Any = targets) -> dict[str, Any]:
            model = keras.Sequential(
                [keras.Input((6,), dtype="int64"), keras.layers.Embedding(9, 4), keras.layers.Dense(9)]
            )
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), loss)
            return fit_alone(model, {"x": tf.data.Dataset.from_tensor_slices((tokens, targets)).batch(batch)})

        both(script, rtol=1e-5)


class Codes(keras.layers.Layer):
    """As of VQ-VAE: codes for all rows, beside each row's distance from them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(self.number, shape[-1]), name="codes")

    def call(self, x: Any) -> Any:
        return {"p": ops.matmul(x, ops.transpose(self.codes)), "codes": self.codes + 0.0}


@feature
def outputs_without_rows() -> None:
    """As many as a rank has rows among them, and twice as many."""
    x, y = rows("ragged")

    def size_of(t: Any, p: Any) -> Any:
        return ops.sum(ops.abs(p))

    for number in (3, BATCH, 2 * BATCH):

        def script(batch: int, number: int = number) -> dict[str, Any]:
            inputs = keras.Input((5,))
            model = keras.Model(inputs, Codes(number)(inputs))
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.01), size_of, metrics={"codes": [size_of]})
            return fit_alone(model, {"x": tf.data.Dataset.from_tensor_slices((x, {"p": y, "codes": y})).batch(batch)})

        both(script)


@feature
def outputs_of_batches_of_one_size() -> None:
    """As of a stateful layer: a constant first dimension that is that of the rows."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        inputs = keras.Input(batch_shape=(batch, 5))
        outputs = ops.reshape(keras.layers.Dense(2)(inputs), (batch, 2))
        model = keras.Model(inputs, outputs)
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), root, metrics=[root])
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


@feature
def outputs_of_several_entries_a_row() -> None:
    """As of a sequence that is flattened for the loss; the batch's size is known."""
    x, y = rows("even")

    def flat_root(y_true: Any, y_pred: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(ops.reshape(y_true, (-1, 1)) - y_pred)))

    def script(batch: int) -> dict[str, Any]:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, ops.reshape(keras.layers.Dense(2)(inputs), (-1, 1)))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), flat_root)
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


@feature
def the_size_of_what_is_gathered_is_told_once() -> None:
    x, y = rows("ragged")
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(global_batch, "LARGE_MESSAGE", 2 * BATCH * 8)
        for batch in (BATCH, BATCH - 1):
            fresh()
            with kdist.scope(scale_lr=None):
                model = mlp()
                model.compile("sgd", root)
                model.fit(x, y, batch_size=batch, verbose=0)
    told = [each for each in said if "bytes in a step" in each]
    expected = [f"The loss 'root' is computed from the rows of all ranks, of which this rank sends {4 * BATCH * 8} "]
    assert [each[: len(expected[0])] for each in told] == (expected if kdist.rank() == 0 else []), told


@feature
def losses_of_keras_in_other_ways() -> None:
    """Circle, which relates rows; a dtype of its own; a number for a batch that has weights."""
    x, y = rows("ragged")
    classes = (np.arange(len(x)) % 3).astype("int64")
    weight = np.linspace(0.1, 3.0, len(x))
    for make, targets, rtol in (
        (keras.losses.Circle, (classes,), 1e-9),
        (lambda: keras.losses.MeanSquaredError(dtype="float32"), (y,), 1e-5),
        (lambda: root, (y, weight), 1e-9),
    ):

        def script(batch: int, make: Any = make, targets: Any = targets) -> dict[str, Any]:
            inputs = keras.Input((5,))
            model = keras.Model(inputs, keras.layers.UnitNormalization()(keras.layers.Dense(2)(inputs)))
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), make())
            return fit_alone(model, fed("arrays", (x, *targets), batch))

        both(script, rtol=rtol)


class Doubled(keras.metrics.MeanAbsoluteError):
    """A class of the user's, whose mask comes with the predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(2 * y_true, y_pred, sample_weight)


@feature
def masked_metrics_of_the_users_own() -> None:
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(keras.optimizers.SGD(0.1), root, metrics=[Doubled(name="doubled"), of_rows])
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


class Counts(keras.layers.Layer):
    """Variables of TensorFlow's that say how they are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.num = tf.Variable(np.zeros(()), trainable=False, aggregation=tf.VariableAggregation.SUM)
        self.mean = tf.Variable(np.zeros(2), trainable=False, aggregation=tf.VariableAggregation.MEAN)

    def call(self, x: Any) -> Any:
        self.num.assign_add(tf.reduce_sum(x))
        self.mean.assign(tf.reduce_mean(x, 0))
        return x


class Queue(keras.layers.Layer):
    """As MoCo's: the newest outputs of all ranks are the negatives of the next step."""

    def build(self, shape: Any) -> None:
        self.queue = self.add_weight(shape=(6, shape[-1]), initializer="ones", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        scores = ops.matmul(x, ops.transpose(self.queue + 0))
        if training:
            self.queue.assign(ops.concatenate([ops.stop_gradient(kdist.all_gather(x)), self.queue + 0])[:6])
        return scores


@feature
def state_of_layers_that_is_the_global_batchs() -> None:
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        counts, queue = Counts(), Queue()
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), counts, queue, keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), root)
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return outcome(model, history, counts=[counts.num.numpy(), counts.mean.numpy(), queue.queue.numpy()])

    both(script)
