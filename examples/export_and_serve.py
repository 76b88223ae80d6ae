"""Trains on several processes, exports the model, and serves it without kdist and without Keras.

kdist run -np 2 examples/export_and_serve.py
python examples/export_and_serve.py --serve exported

The first line leaves a SavedModel in --directory, and beside it a few rows and what `model.predict` said of them. The
second one loads it, as any program with TensorFlow can, and compares.
"""

import argparse
from pathlib import Path

import numpy as np


def train(directory: Path, epochs: int, batch_size: int) -> None:
    """Trains a model of the digits and exports it."""
    # Not at the top, as in other scripts: what serves shall need neither of them.
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import kdist

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)

    with kdist.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(x, y, batch_size=batch_size, epochs=epochs, validation_data=(x_test, y_test))
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
        predictions = model.predict(x_test[:5], verbose=0)  # on all processes: each gets all of them
    if kdist.is_chief():
        model.export(directory, verbose=False)
        np.savez(directory / "asked.npz", rows=x_test[:5], predictions=predictions)
        print(f"test accuracy: {result['accuracy']:.3f}")


def serve(directory: Path) -> None:
    """Loads what was exported and predicts the rows that lie beside it."""
    import tensorflow as tf

    served = tf.saved_model.load(directory)
    asked = np.load(directory / "asked.npz")
    answers = served.serve(asked["rows"]).numpy()
    difference = np.abs(answers - asked["predictions"]).max()
    print(f"served digits: {answers.argmax(axis=1).tolist()}, off model.predict by at most {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    parser.add_argument("--directory", type=Path, default=Path("exported"), help="where the model is exported to")
    parser.add_argument("--serve", type=Path, metavar="DIRECTORY", help="serve what is there instead of training")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    else:
        train(arguments.directory, arguments.epochs, arguments.batch_size)


if __name__ == "__main__":
    main()
