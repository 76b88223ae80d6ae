"""TensorFlow's tutorial "Multi-worker training with Keras", whose fit fails in Keras 3, under kdist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.helpers import spmd

# https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras, on random images instead of a download. As
# there, the dataset is made before the strategy's scope is entered; two lines are other ones.
TUTORIAL = """
import os, json
import numpy as np
import tensorflow as tf
import keras
import kdist

def mnist_dataset(batch_size):
    x_train = np.random.default_rng(0).normal(size=(640, 28, 28)).astype(np.float32)
    y_train = np.random.default_rng(1).integers(0, 10, 640).astype(np.int64)
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    return train_dataset.shuffle(640, seed=3).repeat().batch(batch_size)

def build_and_compile_cnn_model():
    model = keras.Sequential([
        keras.layers.InputLayer(shape=(28, 28)),
        keras.layers.Reshape(target_shape=(28, 28, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model

per_worker_batch_size = 16
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
multi_worker_dataset = mnist_dataset(per_worker_batch_size)  # kdist: each worker's batch

with kdist.scope():  # strategy = tf.distribute.MultiWorkerMirroredStrategy(); with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()

history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=20, verbose=0)
loss = history.history["loss"]
assert len(loss) == 3 and all(np.isfinite(loss)), loss
print("tutorial", num_workers, kdist.rank(), [f"{each:.6f}" for each in loss])
"""


def test_the_tutorial_trains_on_two_workers(tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(TUTORIAL)
    command = [sys.executable, "-m", "kdist.cli.main", "run", "--strategy", "collective", "-np", "2"]
    command += ["--output", str(tmp_path / "out"), str(script)]
    finished = spmd.execute(command, env=spmd.RANK_ENVIRONMENT, timeout=240)
    assert finished.returncode == 0, finished.output
    said = [re.search(r"tutorial 2 (\d) (.*)", (tmp_path / "out" / f"rank{rank}.out").read_text()) for rank in range(2)]
    ranks, losses = zip(*[match.groups() for match in said if match], strict=True)
    assert ranks == ("0", "1")
    assert losses[0] == losses[1]
    assert "2 ranks train together over collective" in finished.output
