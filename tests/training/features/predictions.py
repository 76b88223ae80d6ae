"""`predict`, `evaluate` and the methods of one batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    Batches,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    mlp,
    outcome,
    rows,
    size,
)


@feature
def on_batch() -> None:
    for shape in ("ragged", "few"):
        x, y = rows(shape)

        def script(_: int, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
            trained = [model.train_on_batch(x, y, return_dict=True) for _ in range(3)]
            tested = model.test_on_batch(x, y, return_dict=True)
            return outcome(model, trained=trained, tested=tested, predicted=model.predict_on_batch(x))

        both(script)


@feature
def predictions_without_rows() -> None:
    """A mean of the batch, how many rows it has, and tables, some as long as a rank's batch."""

    class Codes(keras.Layer):
        def build(self, input_shape: Any) -> None:
            self.codes = self.add_weight(shape=(3, 2), initializer="ones")
            self.as_long = self.add_weight(shape=(BATCH, 2), initializer="ones")
            with tf.init_scope():
                self.captured = tf.constant(3)

        def call(self, inputs: Any) -> Any:
            codes = 2.0 * self.codes
            return {
                "codes": codes,
                "as long": 2.0 * self.as_long,
                "ragged codes": tf.RaggedTensor.from_tensor(codes, lengths=[2, 1, 2]),
                "sparse codes": tf.sparse.from_dense(codes),
                "alike": tf.ones_like(inputs) * self.codes[0, 0],  # of a graph that knows how many rows there are
                "scale": keras.ops.zeros_like(inputs) + self.codes[0, 0],
                "rows": tf.shape(inputs)[0],
                "twice": 2 * tf.shape(inputs)[0],
                "width": tf.shape(inputs)[1],
                "columns": tf.range(tf.shape(inputs)[1]),
                "number": tf.constant(BATCH),
                "captured": self.captured,
                "mean": tf.reduce_mean(inputs),
                "far": tf.reduce_any(inputs > 1.5),
            }

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Codes()

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    # The last of three steps has one row less on one rank, or none on all but one.
    for num_rows in (3 * size() * BATCH - 1, 2 * size() * BATCH + 1):
        x = np.random.default_rng(0).normal(size=(num_rows, 2))

        def script(batch: int, x: Any = x) -> dict[str, Any]:
            model = Model()
            model.compile(run_eagerly=False)
            predicted = model.predict(x, batch_size=batch, verbose=0)
            of_dataset = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(batch), verbose=0)
            last = model.predict_on_batch(x[: size() * BATCH - 1])
            for each in (predicted, of_dataset, last):
                each["sparse codes"] = tf.sparse.to_dense(each["sparse codes"])
                each["ragged codes"] = each["ragged codes"].to_tensor()
            return {"predicted": predicted, "of a dataset": of_dataset, "on batch": last}

        both(script)


@feature
def predictions_that_are_no_plain_arrays() -> None:
    """Text, ragged tensors, and sequences whose padding differs from batch to batch."""
    x, _ = rows("ragged")
    lengths = np.arange(len(x)) % 4

    class Failure(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return {
                "text": tf.strings.as_string(inputs[:, 0], precision=3),
                "ragged": tf.RaggedTensor.from_tensor(inputs, lengths=tf.cast(tf.abs(inputs[:, 0]) * 2, tf.int64)),
            }

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor((inputs.shape[0],))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.verdict = Failure()

        def predict_step(self, data: Any) -> Any:
            return self.verdict.call(data)

    class PadWithin(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.RaggedTensor.from_tensor(tf.ones([tf.size(data), 3, 2]), lengths=data).to_tensor()

    class FoundNothing(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.boolean_mask(tf.ones([tf.shape(data)[0], 3, 4]), [False] * 3, axis=1)

    class Encoded(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.sparse.from_dense(tf.one_hot(data, 4) * tf.cast(data[:, tf.newaxis], "float32"))

    class Pad(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.one_hot(data, 3)

    def script(batch: int) -> dict[str, Any]:
        verdict = Model().predict(x, batch_size=batch, verbose=0)
        ragged = verdict["ragged"]
        sequences = tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: tf.range(n) % 3)
        # The user's own batches in both, for their padding is what differs.
        padded = Pad().predict(sequences.padded_batch(BATCH, [None]), verbose=0)
        even = Pad().predict(sequences.take(8).padded_batch(4, [None]), verbose=0)
        assert isinstance(even, np.ndarray), type(even)
        # The input's shape is fixed, and the model's output is as wide as the widest row of a batch.
        within = PadWithin().predict(tf.data.Dataset.from_tensor_slices(lengths % 3 + 1).batch(BATCH), verbose=0)
        nothing = FoundNothing().predict(x, batch_size=batch, verbose=0)
        encoded = Encoded().predict(lengths, batch_size=batch, verbose=0)
        assert isinstance(encoded, tf.SparseTensor)
        return {
            "sparse": tf.sparse.to_dense(encoded).numpy(),
            "text": [text.decode() for text in verdict["text"]],
            "values": ragged.flat_values.numpy(),
            "splits": ragged.row_splits.numpy(),
            "padded": padded.to_list() if isinstance(padded, tf.RaggedTensor) else padded.tolist(),
            "even": even,
            "within": within.to_list(),
            "nothing": nothing,
        }

    both(script)


@feature
def predictions_of_several_rows_a_sample() -> None:
    """A model that puts out more rows than it takes: all of them come back, in order."""
    for shape in ("ragged", "few"):
        x, _ = rows(shape)

        def script(batch: int, x: np.ndarray = x) -> dict[str, Any]:
            inputs = keras.Input((5,))
            outputs = keras.ops.reshape(keras.layers.Dense(6)(inputs), (-1, 2))
            model = keras.Model(inputs, outputs)
            deterministic_weights(model)
            return {"predict": model.predict(x, batch_size=batch, verbose=0)}

        both(script)


@feature
def weights_loaded_by_the_chief_before_it_evaluates() -> None:
    """By a callback that all ranks run; and before a first `predict_on_batch`."""
    x, y = rows("ragged")

    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if kdist.is_chief():
                self.model.set_weights([np.full(v.shape, 0.25) for v in self.model.get_weights()])
            self.result = self.model.evaluate(x, y, batch_size=BATCH, verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model, restores = mlp(), Restores()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[restores])
        other = mlp()
        if kdist.is_chief() or batch != BATCH:
            other.set_weights([np.full(v.shape, 0.5) for v in other.get_weights()])
        plain = batch != BATCH
        if plain:  # every rank is one process here
            model.set_weights([np.full(v.shape, 0.25) for v in model.get_weights()])
            restores.result = model.evaluate(x, y, batch_size=batch, verbose=0)
        return {"result": restores.result, "on batch": other.predict_on_batch(x)}

    both(script)


@feature
def weights_loaded_by_the_chief_as_an_epoch_begins() -> None:
    """The first step of the epoch has them on all ranks."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        class Restores(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 1 and (kdist.is_chief() or batch != BATCH):
                    self.model.set_weights([np.full(v.shape, 0.25) for v in self.model.get_weights()])

        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch), callbacks=[Restores()])

    both(script)


@feature
def predictions_of_a_dataset() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices(x).batch(batch)
        return {
            "predict": model.predict(dataset, verbose=0),
            "evaluate": model.evaluate(Batches((x, y), batch), verbose=0),
        }

    both(script)


@feature
def predictions_of_a_model_that_was_never_compiled() -> None:
    """By each method that needs no `compile`, more than once; built or not; with `jit_compile` set by hand."""
    x, _ = rows("ragged")

    class Unbuilt(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    def script(batch: int) -> dict[str, Any]:
        on_batch, whole, mixed, jit, unbuilt, eager = Unbuilt(), Unbuilt(), mlp(), mlp(), Unbuilt(), mlp()
        jit.jit_compile = unbuilt.jit_compile = mixed.jit_compile = True
        eager.run_eagerly = True
        found = [on_batch.predict_on_batch(x) for _ in range(3)]
        whole.predict(x, verbose=0)
        whole.jit_compile = True
        found += [whole.predict(x, batch_size=batch, verbose=0) for _ in range(2)]
        found += [mixed.predict_on_batch(x), mixed.predict(x, batch_size=batch, verbose=0), mixed.predict_on_batch(x)]
        for model in (jit, unbuilt, eager):
            found += [model.predict(x, batch_size=batch, verbose=0) for _ in range(2)]
            found += [model.predict_on_batch(x) for _ in range(2)]
        jit.jit_compile = False
        jit.compile("sgd", "mse")  # as well later as before
        jit.jit_compile = True
        found += [jit.predict_on_batch(x), jit.evaluate(x, x[:, :2], batch_size=batch, verbose=0)]
        return {"found": found}

    both(script)
