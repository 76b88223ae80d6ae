"""Transfer learning: a network that knows the digits 0 to 4 learns 5 to 9.

python examples/transfer_learning.py
kdist run -np 2 examples/transfer_learning.py

The first process trains the base in plain Keras and saves it; the others wait for the file. All of them load it in the
scope, train a new head on the frozen base, and then all of the network at a lower rate.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_base(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Trains a classifier and saves it: a script as it was before several processes."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="features"),
            keras.layers.Dense(5),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.005), loss=LOSS)
    model.fit(x, y, epochs=5, verbose=0)
    model.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the new head, and again of all layers")
    parser.add_argument("--batch-size", type=int, default=16, help="rows that each process takes in a step")
    parser.add_argument("--base", type=Path, default=Path("base.keras"), help="the base, made if it is not there")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    known = labels < 5
    x, x_test, y, y_test = train_test_split(images[~known], labels[~known] - 5, test_size=0.2, random_state=0)

    with kdist.chief_first():
        if not arguments.base.exists():
            train_base(arguments.base, images[known], labels[known])

    with kdist.scope():
        trained = keras.models.load_model(arguments.base)
        base = keras.Model(trained.inputs, trained.get_layer("features").output)
        base.trainable = False
        model = keras.Sequential([base, keras.layers.Dense(5)])
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=LOSS, metrics=["accuracy"])
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs)
        head_alone = model.evaluate(x_test, y_test, verbose=0, return_dict=True)

        base.trainable = True
        # Keras takes the change over when the model is compiled.
        model.compile(optimizer=keras.optimizers.Adam(0.001), loss=LOSS, metrics=["accuracy"])
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs)
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}, with the new head alone: {head_alone['accuracy']:.3f}")


if __name__ == "__main__":
    main()
