"""A network with two outputs, two weighted losses and sample weights: the digit, and whether it is even.

python examples/several_outputs.py
kdist run -np 2 examples/several_outputs.py

The second label is known of half of the rows only: the others have weight 0 there. Each loss is divided by its own sum
of weights over all processes, whichever of them got the rows that count.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, digits = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, digits, test_size=0.2, random_state=0)
    is_known = np.random.default_rng(0).random(len(y)) < 0.5  # with a seed: the same rows on all processes

    with kdist.scope():
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(128, activation="relu")(inputs)
        outputs = {
            "digit": keras.layers.Dense(10, activation="softmax", name="digit")(hidden),
            "even": keras.layers.Dense(1, activation="sigmoid", name="even")(hidden),
        }
        model = keras.Model(inputs, outputs)
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss={
                "digit": "sparse_categorical_crossentropy",
                # Keras' own mean divides by all rows, also those of weight 0.
                "even": keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight"),
            },
            loss_weights={"digit": 1.0, "even": 0.5},
            metrics={"digit": "accuracy"},
            weighted_metrics={"even": "accuracy"},
        )
        model.fit(
            x,
            {"digit": y, "even": y % 2 == 0},
            sample_weight={"digit": np.ones(len(y)), "even": is_known.astype("float32")},
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
        )
        result = model.evaluate(x_test, {"digit": y_test, "even": y_test % 2 == 0}, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['digit_accuracy']:.3f} of the digit, {result['even_accuracy']:.3f} of even")


if __name__ == "__main__":
    main()
