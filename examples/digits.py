"""Handwritten digits: a Keras script as any other, but for `import kdist` and `with kdist.scope():`.

python examples/digits.py
kdist run -np 2 examples/digits.py
mpirun -np 2 python examples/digits.py
"""

import argparse
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    parser.add_argument("--output", type=Path, default=Path(), help="directory for digits.keras and digits.csv")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the rows, to compare runs")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8 pixels, from 0 to 16
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)

    with kdist.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(
            x,
            y,
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            shuffle=not arguments.no_shuffle,
            validation_data=(x_test, y_test),
            callbacks=[
                keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
                keras.callbacks.ModelCheckpoint(arguments.output / "digits.keras", "val_loss", save_best_only=True),
                keras.callbacks.CSVLogger(arguments.output / "digits.csv"),
            ],
        )
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
