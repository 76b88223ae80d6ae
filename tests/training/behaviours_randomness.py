"""Dropout and its kin: other draws on each rank, equal seed states, and the same again from the same seed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.behaviours import assert_equal_everywhere, everyone, weights_of

ROWS = 8


class Masks(keras.Model):
    """Notes the mask that dropout drew in each step."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []
        self.drop, self.dense = layer, keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        dropped = self.drop(inputs, training=training)

        def note(values: Any) -> Any:
            self.masks.append([bool(v) for v in np.ravel(values) == 0])
            return np.int32(0)

        if training:
            tf.numpy_function(note, [dropped], tf.int32)
        return self.dense(dropped)


class FunctionalDropout(keras.layers.Layer):
    """Draws from Keras' global generator, as `keras.random` does without a seed."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return keras.random.dropout(inputs, 0.5) if training else inputs


def train(make_layer: Any) -> tuple[list[list[bool]], keras.Model]:
    keras.utils.set_random_seed(11)
    x = np.ones((ROWS * kdist.size(), 6), "float32")
    y = np.linspace(0, 1, len(x))[:, None]
    with kdist.scope(scale_lr=None):
        model = Masks(make_layer())
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=ROWS // 2, epochs=2, verbose=0)
    return model.masks, model


def masks_differ_between_ranks_and_runs_are_reproducible() -> None:
    for make_layer in (
        lambda: keras.layers.Dropout(0.5),
        lambda: keras.layers.Dropout(0.5, seed=3),
        FunctionalDropout,
        lambda: keras.Sequential([keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.5)]),
    ):
        masks, model = train(make_layer)
        assert len(masks) == 4
        by_rank = everyone(masks)
        for one in range(kdist.size()):
            assert len({tuple(mask) for mask in by_rank[one]}) == 4, "each step draws anew"
            for other in range(one):
                assert all(a != b for a, b in zip(by_rank[one], by_rank[other], strict=True))
        states = [np.asarray(v).tolist() for v in model.non_trainable_variables]
        assert_equal_everywhere(states)
        assert_equal_everywhere(weights_of(model))
        again, repeated = train(make_layer)
        assert again == masks
        assert weights_of(repeated) == weights_of(model)


def augmentation_in_the_model_differs_too() -> None:
    """Random layers of preprocessing draw per rank as well."""
    images = np.arange(2 * kdist.size() * 16, dtype="float32").reshape(-1, 4, 4, 1)
    images[:] = images[:1]
    seen: list[Any] = []

    def note(values: Any) -> Any:
        seen.append(np.ravel(values).tolist())
        return np.int32(0)

    class Noting(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            tf.numpy_function(note, [inputs], tf.int32)
            return inputs

    with kdist.scope(scale_lr=None):
        model = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                keras.layers.GaussianNoise(1.0),
                Noting(),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        model.fit(images, np.zeros(len(images)), batch_size=2, verbose=0)
    drawn = everyone(seen[-1])
    assert len({tuple(each) for each in drawn}) == kdist.size()


def augmentation_in_a_map_differs_too() -> None:
    """Made before the scope, with seeds that are equal on all ranks; a map of samples and one of batches."""

    def trained(make_augment: Any, of_batches: bool) -> list[list[bool]]:
        keras.utils.set_random_seed(11)
        augment = make_augment()
        x = np.ones((ROWS * kdist.size(), 6), "float32")
        dataset = tf.data.Dataset.from_tensor_slices((x, np.linspace(0, 1, len(x))[:, None]))
        dataset = dataset.batch(ROWS // 2) if of_batches else dataset
        dataset = dataset.map(lambda row, target: (augment(row), target))
        with kdist.scope(scale_lr=None):
            model = Masks(keras.layers.Activation("linear"))
            model.compile("sgd", "mse")
            model.fit(dataset if of_batches else dataset.batch(ROWS // 2), verbose=0)
        return model.masks

    def of_keras() -> Any:
        layer = keras.layers.Dropout(0.5)
        return lambda row: layer(row, training=True)

    def of_tensorflow() -> Any:
        return lambda row: row * tf.cast(tf.random.uniform(tf.shape(row)) > 0.5, row.dtype)

    for make_augment in (of_keras, of_tensorflow):
        for of_batches in (False, True):
            masks = trained(make_augment, of_batches)
            by_rank = everyone(masks)
            assert [len({tuple(mask) for mask in masks}) for masks in zip(*by_rank, strict=True)] == [kdist.size()] * 2
            assert trained(make_augment, of_batches) == masks


def global_seeds_stay_the_users() -> None:
    """NumPy and Python draw the same on all ranks after the scope is entered, seeded or not."""
    import random

    with kdist.scope():
        pass
    assert_equal_everywhere([float(np.random.random()), random.random()])


CASES = {
    function.__name__: function
    for function in (
        masks_differ_between_ranks_and_runs_are_reproducible,
        augmentation_in_the_model_differs_too,
        augmentation_in_a_map_differs_too,
        global_seeds_stay_the_users,
    )
}
