"""A script that trains a table of 256 MB with Adam in a process whose memory is limited, as by a batch system."""

from __future__ import annotations

import resource

import keras
import numpy as np

import kdist
from kdist.planning.activations import status

ROWS, WIDTH = 1_000_000, 64
LIMIT = 4 * 4 * ROWS * WIDTH
"""Bytes beside what the process holds before the model is made: four times the table."""

if __name__ == "__main__":
    with kdist.scope(kdist.AllReduce(shard_embeddings=1e6)):
        keras.ops.zeros((1,))  # TensorFlow is ready
        most = status("VmData") + LIMIT
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        table = keras.layers.Embedding(ROWS, WIDTH, name="words")
        layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,), dtype="int64"), *layers])
        model.compile("adam", "mse")
        ids = np.minimum(np.random.default_rng(0).zipf(1.2, (32, 8)), ROWS) - 1
        model.fit(ids, np.zeros((32, 1), "float32"), batch_size=4, epochs=2, verbose=0)
    print("TRAINED", flush=True)
