"""Losses, their denominators, masks and regularizers."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    mlp,
    outcome,
    rows,
    sequence_model,
    sequences,
    size,
)


@feature
def masked_sequences() -> None:
    """Masks, an embedding, a recurrent layer, a masked metric; ranks have different numbers of unmasked steps."""
    x, y = sequences()
    rtol = 1e-9 if keras.__version__ >= "3.13" else 1e-6  # Keras before adds an epsilon to the count of unmasked steps

    def recurrent(batch: int) -> dict[str, Any]:
        model = sequence_model(keras.layers.SimpleRNN, return_sequences=True)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(recurrent, rtol=rtol)
    for reduction in ("mean_with_sample_weight", "sum"):

        def script(batch: int, reduction: str = reduction) -> dict[str, Any]:
            model = sequence_model()
            model.compile("adam", keras.losses.MeanSquaredError(reduction=reduction), metrics=["mae"])
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script, rtol=rtol)


@feature
def masked_sequences_that_are_as_wide_as_their_batch() -> None:
    """A metric of Keras divides by the width of the batch, which is that of the widest rank."""
    x, _ = sequences()
    lengths = [int(each) for each in np.random.default_rng(3).integers(1, 7, size=len(x))]
    x = np.where(np.arange(x.shape[1]) < np.asarray(lengths)[:, None], np.maximum(x, 1), 0)

    def script(batch: int, eager: bool = False) -> dict[str, Any]:
        ragged = tf.RaggedTensor.from_tensor(x, lengths=lengths)
        data = tf.data.Dataset.from_tensor_slices(ragged).map(
            lambda row: (row, (row * 3) % 9, tf.cast(row % 2 + 1, tf.float64))
        )
        embedding = keras.layers.Embedding(9, 4, mask_zero=True)
        model = keras.Sequential([keras.Input((None,), dtype="int64"), embedding, keras.layers.Dense(9)])
        deterministic_weights(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        weighted = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], weighted_metrics=[weighted], run_eagerly=eager
        )
        data = data.padded_batch(batch)
        return outcome(model, model.fit(data, epochs=2, verbose=0, validation_data=data))

    both(script)
    both(functools.partial(script, eager=True))


@feature
def sequences_of_unknown_length() -> None:
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int64"),
                keras.layers.Embedding(9, 4),
                keras.layers.SimpleRNN(3, return_sequences=True),
            ]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return fit_evaluate_predict(
            model, fed("tf_data", (x, np.repeat(y, 3, axis=-1)), batch), x, np.repeat(y, 3, axis=-1), batch
        )

    both(script)


@feature
def weights_of_rows_that_a_layer_learns() -> None:
    """The denominator is a sum over all ranks, and has gradients."""
    x, y = rows("ragged")

    class Confident(keras.Sequential):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            weight = keras.ops.sigmoid(y_pred[:, 0])
            return super().compute_loss(x, y, y_pred, weight, training)

    def script(batch: int) -> dict[str, Any]:
        model = Confident([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


@feature
def loss_reductions() -> None:
    weight = np.linspace(0.1, 3.0, len(rows("ragged")[0]))
    x, y = rows("ragged")
    for reduction in ("sum", "mean_with_sample_weight", "sum_over_batch_size", "none"):

        def script(batch: int, reduction: str = reduction) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=reduction))
            return fit_alone(model, fed("arrays", (x, y, weight), batch))

        both(script)


@feature
def losses_that_leave_out_a_class() -> None:
    """What is left out differs between the ranks, alone and where sequences have a mask, too."""
    x, _ = rows("ragged")
    x = np.stack([x, x * 2, -x, x + 1], axis=1)
    classes = np.arange(len(x) * 4).reshape(-1, 4) % 3
    ignored = np.where(np.arange(4) < (np.arange(len(x)) % 5)[:, np.newaxis], -1, classes)
    weight = np.linspace(0.1, 3.0, ignored.size).reshape(ignored.shape)
    x[::3, 2:] = 0.0
    # Keras 3.12 adds 1e-7 to the number of what counts.
    rtol = 1e-7 if keras.__version__.startswith("3.12.") else 1e-9
    for length, is_masked in ((4, False), (None, False), (4, True)):
        for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):

            def script(
                batch: int, length: Any = length, is_masked: bool = is_masked, reduction: str = reduction
            ) -> dict[str, Any]:
                masking = [keras.layers.Masking()] if is_masked else []
                model = keras.Sequential([keras.Input((length, 5)), *masking, keras.layers.Dense(3)])
                deterministic_weights(model)
                loss = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, ignore_class=-1, reduction=reduction
                )
                model.compile(keras.optimizers.SGD(0.1), loss)
                return fit_evaluate_predict(model, fed("arrays", (x, ignored, weight), batch), x, ignored, batch)

            both(script, rtol=rtol)


@feature
def losses_whose_call_is_the_instances_own() -> None:
    class Chosen(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.call = self.squared

        def squared(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    simple(lambda: {"loss": Chosen()}, all_methods=True)


@feature
def regularizers_and_add_loss() -> None:
    class Activity(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    def model() -> keras.Model:
        made = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, kernel_regularizer="l2", activation="tanh", activity_regularizer="l2"),
                Activity(),
                keras.layers.ActivityRegularization(l1=0.1),
                keras.layers.Dense(2, bias_regularizer="l2"),
            ]
        )
        deterministic_weights(made)
        return made

    simple(lambda: {"metrics": ["mae"]}, model=model, all_methods=True)


@feature
def several_outputs() -> None:
    """Two outputs with losses of different denominators, loss weights, weights for one output, a metric for each."""
    for shape in ("ragged", "one short"):
        _several_outputs(shape)


def _several_outputs(shape: str) -> None:
    x, y = rows(shape)
    x2 = x[:, :3] * 2
    weight = np.linspace(0.0, 2.0, len(x))

    def script(batch: int) -> dict[str, Any]:
        a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
        hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([a, b]))
        model = keras.Model(
            {"a": a, "b": b},
            {"one": keras.layers.Dense(2, name="one")(hidden), "two": keras.layers.Dense(1, name="two")(hidden)},
        )
        deterministic_weights(model)
        model.compile(
            keras.optimizers.Adam(0.01),
            loss={"one": "mse", "two": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")},
            loss_weights={"one": 0.3, "two": 2.0},
            metrics={"one": ["mae"], "two": ["mse"]},
        )
        inputs, targets = {"a": x, "b": x2}, {"one": y, "two": y[:, :1]}
        weights = {"one": np.ones(len(x)), "two": weight}
        history = model.fit(
            inputs, targets, sample_weight=weights, batch_size=batch, epochs=2, shuffle=False, verbose=0
        )
        if shape != "ragged":
            return outcome(model, history)
        return outcome(
            model,
            history,
            evaluate=model.evaluate(inputs, targets, batch_size=batch, verbose=0, return_dict=True),
            predict=model.predict(inputs, batch_size=batch, verbose=0),
        )

    both(script)


@feature
def logged_losses_of_outputs_in_batches_that_ranks_do_not_divide() -> None:
    """Keras weighs them by an output's length where it is fixed, which is another one on each rank."""
    batch = 3 * size() - 1
    x = np.random.default_rng(0).normal(size=(2 * batch, 5))
    x[: batch // 2] *= 9
    y = {"one": x[:, :2] ** 2, "two": x[:, :1]}

    def script(_: int, is_eager: bool = False) -> dict[str, Any]:
        given = keras.Input((5,))
        model = keras.Model(given, {name: keras.layers.Dense(y[name].shape[1], name=name)(given) for name in y})
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), loss={"one": "mse", "two": "mae"}, run_eagerly=is_eager)
        logs: list[Any] = [
            model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
        ]
        for rows_given in (slice(batch), slice(2 * batch)):  # of two lengths, in one mean
            part = {name: values[rows_given] for name, values in y.items()}
            logs.append(model.test_on_batch(x[rows_given], part, return_dict=True))
        return {"logs": logs, "weights": model.get_weights()}

    both(script, scale_batch=False)
    both(functools.partial(script, is_eager=True), scale_batch=False)


@feature
def a_loss_that_one_row_has_not() -> None:
    """A rank without data runs one row at weight 0: its gradient counts nothing, NaN or not."""
    x, y = rows("ragged")

    def spread(y_true: Any, y_pred: Any) -> Any:
        error = y_true - y_pred
        return keras.ops.mean(keras.ops.square(error), axis=-1) / keras.ops.std(y_true)  # 0 for a single row

    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.01), spread)
        model.fit(tf.data.Dataset.from_tensor_slices((x, y[:, :1])).batch(BATCH).take(size() + 1), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


@feature
def hinges_of_targets_of_which_a_rank_has_some_only() -> None:
    """Keras takes targets for 0 and 1 if all of them are: here those of some ranks."""
    x, _ = rows("ragged")
    place = np.arange(len(x))
    y = np.where(place % 2 == 0, 1.0, np.where(place // BATCH % size() == size() - 1, -1.0, 0.0))[:, np.newaxis]

    def script(batch: int) -> dict[str, Any]:
        model = mlp(1)
        model.compile(keras.optimizers.SGD(0.1), "hinge", metrics=[keras.metrics.Hinge(), "squared_hinge"])
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)
