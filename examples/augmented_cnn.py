"""Images that are shifted and turned at random while a network with batch normalisation trains on them.

python examples/augmented_cnn.py
kdist run -np 2 examples/augmented_cnn.py

Keras' augmentation layers draw other numbers on each process. `BatchNormalization(synchronized=True)` normalises by the
rows of all processes, as one process does; without it each process would normalise by its own.
"""

import argparse
from typing import Any

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def convolution(x: Any, filters: int) -> Any:
    """Returns a 3x3 convolution's output, normalised over the rows of all processes."""
    x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=0.9, synchronized=True)(x)
    return keras.layers.ReLU()(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8 pixels, from 0 to 16
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)

    with kdist.scope():
        augmentation = keras.Sequential(
            [
                keras.layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
                keras.layers.RandomRotation(0.04, fill_mode="constant"),
            ]
        )
        inputs = keras.Input((8, 8, 1))
        hidden = convolution(augmentation(inputs), 32)
        hidden = keras.layers.MaxPooling2D()(hidden)
        hidden = convolution(hidden, 64)
        hidden = keras.layers.Flatten()(hidden)
        model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs, validation_data=(x_test, y_test))
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
