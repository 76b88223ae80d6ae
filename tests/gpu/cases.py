"""What the suite for GPUs asks beside the cases of others: where tensors lie, what memory ranks take, step times."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import kdist
from benchmarks import models
from benchmarks.fit_times import timed_fit
from kdist._engine import open_engine
from kdist.engines.collective import CollectiveEngine
from kdist.engines.engine import Engine
from kdist.engines.horovod import built_with_nccl
from tests.training.features.precision import in_float32
from tests.training.fidelity import BATCH, fresh, mlp, rows

MOST_BYTES = 1 << 30  # of a GPU's memory, for models of a few weights; without growth a rank takes nearly all


def engine() -> Engine:
    return open_engine(kdist.cluster_info())


def float32_as_one_process() -> None:
    in_float32(rtol=1e-3)  # Adam divides by roots of small sums, which a GPU adds up in another order


def steps_take_as_long_as_those_of_plain_keras() -> str:
    """Nothing is asserted: the figure is for the reader, who knows what else runs there."""
    keras.config.set_floatx("float32")
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(12800, 784)).astype("float32"), generator.integers(0, 10, 12800)

    def steady() -> float:
        model = models.mlp(keras)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return timed_fit(keras, lambda callbacks: model.fit(x, y, 64, verbose=0, callbacks=callbacks)).steady

    def in_scope() -> float:
        with kdist.scope():
            return steady()

    times = [(steady(), in_scope()) for _ in range(3)]  # in turn
    plain, ours = (sorted(each)[1] for each in zip(*times, strict=True))
    return f"{ours / plain:.2f} of plain Keras' {1000 * plain:.2f} ms"


def trained() -> keras.Model:
    fresh()
    x, y = rows("ragged")
    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return model


def weights_and_slots_are_on_the_device() -> None:
    """Messages over the host's memory do not take variables there."""
    model = trained()
    placed = [each for each in [*model.trainable_variables, *model.optimizer.variables] if len(each.shape)]
    assert len(placed) == 3 * len(model.trainable_variables)  # Adam has two slots each
    devices = {each.value.device.rpartition("device:")[2] for each in placed}
    assert devices == {"GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"}, devices


def embeddings_are_equal_to_the_bit_on_all_ranks() -> None:
    """Many rows for each index: a kernel of a GPU adds them in another order on each rank."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 9, (8 * BATCH, 64))
    clipping = {"class_name": "Adam", "config": {"global_clipnorm": 0.1}}
    for optimizer in ("sgd", "adam", "adagrad", "rmsprop", "lion", clipping):
        fresh()
        with kdist.scope(scale_lr=None):
            model = keras.Sequential(
                [keras.layers.Embedding(9, 16), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
            )
            model.compile(optimizer, "mse", jit_compile=False)
            model.fit(ids, ids.mean(axis=1), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        values = [keras.ops.convert_to_numpy(each) for each in [*model.weights, *model.optimizer.variables]]
        everyone = engine().gather_objects([each.tobytes().hex() for each in values])
        assert everyone.count(everyone[0]) == len(everyone), optimizer


CASES = {
    function.__name__: function
    for function in (
        float32_as_one_process,
        weights_and_slots_are_on_the_device,
        embeddings_are_equal_to_the_bit_on_all_ranks,
    )
}

ALONE = {function.__name__: function for function in (steps_take_as_long_as_those_of_plain_keras,)}


def memory_grows() -> None:
    trained()
    (gpu,) = tf.config.get_visible_devices("GPU")
    assert tf.config.experimental.get_memory_growth(gpu)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    assert 0 < peak < MOST_BYTES, peak


ON_GPUS = {function.__name__: function for function in (memory_grows,)}


def each_rank_has_its_own_gpu() -> None:
    trained()
    everyone = engine().gather_objects([each.name for each in tf.config.get_visible_devices("GPU")])
    assert [len(each) for each in everyone] == [1] * kdist.size(), everyone
    assert len({name for (name,) in everyone}) == kdist.size(), everyone


def nccl_carries_gradients() -> None:
    used = engine()
    assert used._gpu_lane is not None if isinstance(used, CollectiveEngine) else built_with_nccl()


A_GPU_EACH = {function.__name__: function for function in (each_rank_has_its_own_gpu, nccl_carries_gradients)}
