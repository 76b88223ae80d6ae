"""Local SGD on one rank: its state between averages."""

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.state.written import WrittenState
from kdist.step.local_sgd import LocalSGD


def averaged_once(model):
    local_sgd = LocalSGD(
        model, SingleEngine(), WrittenState(SingleEngine()), every=1, learning_rate=0.7, momentum=0.9, bucket_mb=None
    )
    local_sgd.begin()
    for variable in model.trainable_variables:
        variable.assign(variable + 1.0)
    local_sgd.after_step(tf.zeros([3]), lambda votes: None)
    return local_sgd


def test_the_outer_momentum_is_saved_by_numpy(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    local_sgd = averaged_once(model)
    velocities = local_sgd.state_dict()["velocity"]
    assert {id(each) for each in model.trainable_variables} == set(velocities)
    np.savez(tmp_path / "kept.npz", *velocities.values())
    with np.load(tmp_path / "kept.npz") as saved:
        read = dict(zip(velocities, (saved[name] for name in saved.files), strict=True))
    assert all(array.dtype == np.float32 for array in read.values())
    local_sgd.load_state_dict({})
    assert not any(array.any() for array in local_sgd.state_dict()["velocity"].values())
    local_sgd.load_state_dict({"velocity": read})
    for key, array in local_sgd.state_dict()["velocity"].items():
        np.testing.assert_array_equal(array, velocities[key])


def test_the_outer_sgd_updates_an_unfrozen_layer():
    base = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), base, keras.layers.Dense(1)])
    base.trainable = False
    local_sgd = averaged_once(model)
    base.trainable = True
    before = base.kernel.numpy()
    local_sgd.begin()
    base.kernel.assign(before + 1.0)
    local_sgd.after_step(tf.zeros([3]), lambda votes: None)
    np.testing.assert_allclose(base.kernel, before + 0.7 * 1.9, rtol=1e-6)  # Nesterov: 1 + 0.9


def test_learning_rates_are_not_averaged():
    """Votes synchronise them; a mean of equal numbers may round."""

    class Thirds(SingleEngine):
        size = 3

    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.05)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.MultiOptimizer(lambda v: first if v.name == "kernel" else second)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    local_sgd = LocalSGD(
        model, Thirds(), WrittenState(SingleEngine()), every=1, learning_rate=1.0, momentum=0.0, bucket_mb=None
    )
    local_sgd.average_all()
    assert float(first.learning_rate) == np.float32(0.1)
    assert float(second.learning_rate) == np.float32(0.05)
