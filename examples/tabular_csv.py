"""A table in CSV files, read by tf.data: benign or malignant, from thirty numbers of a tissue sample.

python examples/tabular_csv.py
kdist run -np 2 examples/tabular_csv.py

The first process writes the files into --directory, for this example has none; the others wait for it. Each process
then reads its share of the rows. The shuffle has a seed, so that all processes see the same order.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import kdist

NUM_FEATURES = 30


def write_files(directory: Path) -> None:
    """Writes four files of training rows and one of test rows, which comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    data = load_breast_cancer()  # 569 rows, 357 of them benign
    rows = np.column_stack([data.data, data.target])
    train, test = train_test_split(rows, test_size=0.2, random_state=0)
    names = [f"train-{number}.csv" for number in range(4)]
    for name, part in zip([*names, "test.csv"], [*np.array_split(train, 4), test], strict=True):
        with open(directory / name, "w", newline="") as file:
            csv.writer(file).writerows([[*data.feature_names, "benign"], *part.tolist()])


def rows_of(files: Sequence[Path]) -> tf.data.Dataset:
    """Returns the features and the label of each row."""

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        *features, label = tf.io.decode_csv(line, [0.0] * (NUM_FEATURES + 1))
        return tf.stack(features), label

    names = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    return names.interleave(lambda name: tf.data.TextLineDataset(name).skip(1)).map(parse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="rows that each process takes in a step")
    parser.add_argument("--directory", type=Path, default=Path("tissue"), help="where the CSV files are")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    test_file = arguments.directory / "test.csv"
    with kdist.chief_first():
        if not test_file.exists():
            write_files(arguments.directory)

    with kdist.scope():
        rows = rows_of(sorted(arguments.directory.glob("train-*.csv")))  # in the same order on all processes
        train = rows.shuffle(1000, seed=0).batch(arguments.batch_size)
        test = rows_of([test_file]).batch(arguments.batch_size)
        normalization = keras.layers.Normalization()
        normalization.adapt(train.map(lambda features, label: features))
        model = keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                normalization,
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.002), loss="binary_crossentropy", metrics=["accuracy"])
        model.fit(train, epochs=arguments.epochs, validation_data=test)
        result = model.evaluate(test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
