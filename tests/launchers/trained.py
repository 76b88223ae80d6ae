"""A small training whose numbers are compared: `python tests/launchers/trained.py FOLDER` writes them there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np

import kdist
from kdist._engine import open_engine


def main(folder: Path) -> None:
    """Trains in the scope, on global batches of 16 rows whatever the number of ranks."""
    keras.config.set_floatx("float64")
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(200, 5)), generator.normal(size=(200, 2))  # the last batch has 8 rows
    with kdist.scope(scale_lr=None):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=16 // kdist.size(), epochs=2, shuffle=False, verbose=0)
    info = kdist.cluster_info()
    numbers = [*sum(history.history.values(), []), *np.concatenate([each.ravel() for each in model.get_weights()])]
    said = {"numbers": numbers, "size": info.size, "launcher": info.launcher, "engine": open_engine(info).name}
    (folder / f"{info.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
