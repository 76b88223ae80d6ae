"""Handwritten digits with kdist's callbacks: what a long training on many processes is watched with.

python examples/callbacks.py
kdist run -np 2 examples/callbacks.py
python examples/plot_training.py

Leaves training.csv, a log for TensorBoard and the model in --output; the second script draws the first of them.
"""

import argparse
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist
from kdist import callbacks


class WorstDigit(keras.callbacks.Callback):
    """Says which digit is recognised worst: by `predict`, so that it would hang on one process alone."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def on_train_end(self, logs=None):
        """Runs on all ranks, each of which gets all predictions."""
        hits = self.model.predict(self.x, verbose=0).argmax(axis=1) == self.y
        worst = min(range(10), key=lambda digit: hits[self.y == digit].mean())
        if kdist.is_chief():
            print(f"worst digit: {worst}, {hits[self.y == worst].mean():.2f} of them recognised")


class Summary(keras.callbacks.Callback):
    """Writes the model's summary to a file: one process is enough."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_begin(self, logs=None):
        """Runs on the chief."""
        lines = []
        self.model.summary(print_fn=lines.append)
        self.path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    parser.add_argument("--output", type=Path, default=Path("training"), help="directory for what is written")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)
    if kdist.is_chief():
        arguments.output.mkdir(parents=True, exist_ok=True)
    kdist.barrier()

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
            validation_data=(x_test, y_test),
            callbacks=[
                callbacks.LearningRateWarmup(warmup_epochs=1),
                callbacks.LearningRateSchedule({0.8 * arguments.epochs: 0.1}),
                callbacks.NaNPolicy("skip"),
                callbacks.ReplicaCheck(every=10),
                callbacks.Throughput(),
                callbacks.ChiefOnly(Summary(arguments.output / "summary.txt")),
                WorstDigit(x_test, y_test),
                keras.callbacks.CSVLogger(arguments.output / "training.csv"),
                keras.callbacks.TensorBoard(arguments.output / "tensorboard"),
                keras.callbacks.ModelCheckpoint(arguments.output / "digits.keras", "val_loss", save_best_only=True),
            ],
        )
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
