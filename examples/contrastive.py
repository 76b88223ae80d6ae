"""Contrastive learning (SimCLR): a loss over all pairs of the global batch, unchanged on several processes.

python examples/contrastive.py
kdist run -np 2 examples/contrastive.py

The loss compares each image with all others of the batch, so it is no mean over rows. kdist gathers the outputs of all
processes, each computes the loss of the global batch, and goes backward through its own rows: the training is that of
one process with the global batch. What is gathered is small: 32 numbers an image here, twice.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import kdist

TEMPERATURE = 0.2


def views(images: np.ndarray, seed: int) -> np.ndarray:
    """Returns images that are shifted by up to a pixel, with noise."""
    generator = np.random.default_rng(seed)
    shifts = generator.integers(-1, 2, size=(len(images), 2))
    shifted = np.stack([np.roll(image, shift, axis=(0, 1)) for image, shift in zip(images, shifts, strict=True)])
    return (shifted + generator.normal(0, 0.05, shifted.shape)).astype("float32")


def contrastive_loss(_: object, projected: object) -> object:
    """NT-Xent of Chen et al., 2020: both views of an image are near each other, and far from all other images."""
    both = keras.ops.concatenate([projected[:, 0], projected[:, 1]], axis=0)
    both = keras.ops.normalize(both, axis=-1)
    similar = keras.ops.matmul(both, keras.ops.transpose(both)) / TEMPERATURE
    number = keras.ops.shape(both)[0]
    similar = similar - 1e9 * keras.ops.eye(number)  # not with itself
    other = keras.ops.roll(keras.ops.arange(number), number // 2)
    return keras.ops.mean(keras.ops.sparse_categorical_crossentropy(other, similar, from_logits=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)
    pairs = np.stack([views(x, seed=1), views(x, seed=2)], axis=1)

    with kdist.scope():
        encoder = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, "relu"),
                keras.layers.Dense(64, "relu"),
            ]
        )
        inputs = keras.Input((2, 8, 8))
        projected = keras.layers.TimeDistributed(keras.Sequential([encoder, keras.layers.Dense(32)]))(inputs)
        model = keras.Model(inputs, projected)
        model.compile(keras.optimizers.Adam(0.002), contrastive_loss)
        # No labels: a target for each row is what Keras asks for.
        model.fit(pairs, np.zeros(len(pairs)), batch_size=arguments.batch_size, epochs=arguments.epochs)
        features, features_test = (encoder.predict(each, verbose=0) for each in (x, x_test))
    if kdist.is_chief():
        probe = LogisticRegression(max_iter=1000).fit(features, y)
        print(f"test accuracy: {probe.score(features_test, y_test):.3f}")


if __name__ == "__main__":
    main()
