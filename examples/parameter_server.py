"""Handwritten digits, trained asynchronously: variables on parameter servers, steps on workers, Keras on the chief.

kdist run --strategy parameter_server -np 4 --ps 1 examples/parameter_server.py
KDIST_STRATEGY=parameter_server mpirun -np 4 python examples/parameter_server.py
TF_CONFIG='{"cluster": {"chief": [...], "worker": [...], "ps": [...]}, "task": {...}}' python parameter_server.py
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8 pixels, from 0 to 16
    images = images.astype("float32") / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)

    # A worker or a ps serves here until the chief is done, and leaves the script.
    with kdist.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=4,
        )
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs, validation_data=(x_test, y_test))
    result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    print(f"{int(model.optimizer.iterations)} updates, test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
