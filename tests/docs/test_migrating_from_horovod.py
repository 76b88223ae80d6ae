"""The guide for Horovod's users, and a loop with Horovod's own tape.

`test_guide.py` runs what the guide shows, and `tests/test_examples.py` a script like it under horovodrun.
"""

import sys

from tests.docs import guide
from tests.helpers import needs, spmd

PAGE = guide.PAGES["migrating_from_horovod"].read_text()


def test_the_guide_shows_both():
    ((_, before),), ((_, after),) = guide.fences(PAGE, "py"), guide.fences(PAGE, "python")
    assert "hvd" in before
    assert "hvd" not in after


LOOP = """
import horovod.tensorflow as hvd
import keras, numpy as np, tensorflow as tf
import kdist

hvd.init()
rows = np.arange(8.0, dtype="float32").reshape(8, 1) / 8
mine = rows[hvd.rank() :: hvd.size()]
with kdist.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(2 * x, model(x))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])  # Horovod knows no others
        optimizer.apply_gradients(zip(gradients, model.trainable_weights))

    for _ in range(3):
        step(mine)

    kernel, bias = 1.0, 0.0
    for _ in range(3):
        error = kernel * rows + bias - 2 * rows
        kernel, bias = kernel - 0.2 * np.mean(error * rows), bias - 0.2 * np.mean(error)
    np.testing.assert_allclose([w.item() for w in model.get_weights()], [kernel, bias], rtol=1e-5)
    print(f"rank {hvd.rank()} is right")
"""


@needs.horovod
def test_a_loop_with_horovods_tape_trains(tmp_path):
    """Its gradients are averaged twice: once by Horovod, and then they are equal."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    ended = spmd.launch([sys.executable, str(script)], 2, launcher="horovodrun_gloo", timeout=150)
    assert ended.returncode == 0, ended.output
    for words in ("rank 0 is right", "rank 1 is right", "were equal on all of them", "DistributedGradientTape"):
        assert words in ended.output, ended.output
