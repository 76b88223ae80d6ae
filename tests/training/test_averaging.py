"""What ranks that train by themselves keep between averages, as one rank holds it."""

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.training.averaging import Averaging


def averaged_once(model):
    averaging = Averaging(model, SingleEngine(), every=1, learning_rate=0.7, momentum=0.9, bucket_mb=None)
    averaging.begin()
    for variable in model.trainable_variables:
        variable.assign(variable + 1.0)
    averaging.after_step(tf.zeros([3]), lambda requests: None)
    return averaging


def test_an_outer_momentum_is_kept_as_numpy_saves_it(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    averaging = averaged_once(model)
    velocities = averaging.take()["velocity"]
    assert {id(each) for each in model.trainable_variables} == set(velocities)
    np.savez(tmp_path / "kept.npz", *velocities.values())
    with np.load(tmp_path / "kept.npz") as saved:
        read = dict(zip(velocities, (saved[name] for name in saved.files), strict=True))
    assert all(array.dtype == np.float32 for array in read.values())
    averaging.give({})
    assert not any(array.any() for array in averaging.take()["velocity"].values())
    averaging.give({"velocity": read})
    for key, array in averaging.take()["velocity"].items():
        np.testing.assert_array_equal(array, velocities[key])


def test_a_layer_that_is_unfrozen_is_a_weight_from_then_on():
    base = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), base, keras.layers.Dense(1)])
    base.trainable = False
    averaging = averaged_once(model)
    base.trainable = True
    before = base.kernel.numpy()
    averaging.begin()
    base.kernel.assign(before + 1.0)
    averaging.after_step(tf.zeros([3]), lambda requests: None)
    np.testing.assert_allclose(base.kernel, before + 0.7 * 1.9, rtol=1e-6)  # Nesterov: the move, and 0.9 of it


def test_learning_rates_stay_what_they_are():
    """The ranks agree on them by themselves; a mean of equal numbers may round."""

    class Thirds(SingleEngine):
        size = 3

    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.05)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.MultiOptimizer(lambda v: first if v.name == "kernel" else second)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    averaging = Averaging(model, Thirds(), every=1, learning_rate=1.0, momentum=0.0, bucket_mb=None)
    averaging.come_together()
    assert float(first.learning_rate) == np.float32(0.1)
    assert float(second.learning_rate) == np.float32(0.05)
