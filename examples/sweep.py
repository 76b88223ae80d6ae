"""A sweep: each process trains networks of its own, one for each setting that falls to it, and the best is named.

python examples/sweep.py
kdist run -np 2 examples/sweep.py

`kdist.scope("single")` leaves the processes to themselves. What they found goes through files in --directory, which all
of them must see.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import keras
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import kdist

SETTINGS = [{"learning_rate": rate, "units": units} for rate, units in itertools.product([0.1, 0.01, 0.001], [16, 128])]


def train(setting: dict[str, Any], data: list[Any], epochs: int, batch_size: int) -> float:
    """Trains a network and returns its validation loss, the squared error."""
    x, x_validation, y, y_validation = data
    keras.utils.set_random_seed(0)
    with kdist.scope("single"):
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(setting["units"], activation="relu"), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.Adam(setting["learning_rate"]), loss="mse")
        model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0)
        return float(model.evaluate(x_validation, y_validation, verbose=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--directory", type=Path, default=Path("sweep"), help="where each setting's result is written")
    arguments = parser.parse_args()

    x, y = load_diabetes(return_X_y=True)  # 442 patients, 10 standardised numbers of each
    y = (y - y.mean()) / y.std()
    data = train_test_split(x / x.std(), y, test_size=0.2, random_state=0)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    files = [arguments.directory / f"{number}.json" for number in range(len(SETTINGS))]

    kdist.barrier()  # before any network is made: if TensorFlow's own cluster connects, it takes none that came earlier
    for number in range(kdist.rank(), len(SETTINGS), kdist.size()):
        loss = train(SETTINGS[number], data, arguments.epochs, arguments.batch_size)
        files[number].write_text(json.dumps({**SETTINGS[number], "loss": loss, "rank": kdist.rank()}))
    kdist.barrier()  # until the last one has written

    if kdist.is_chief():
        results = [json.loads(file.read_text()) for file in files]
        best = min(results, key=lambda result: result["loss"])
        print(f"best of {len(results)} settings: {best}")


if __name__ == "__main__":
    main()
