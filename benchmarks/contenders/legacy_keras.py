"""Legacy Keras (tf_keras): plain, with Horovod's binding, and in MultiWorkerMirroredStrategy."""

from __future__ import annotations

from models import MODELS

from contenders.keras_fit import train
from contenders.task import Task


def plain(task: Task) -> None:
    """Legacy Keras alone."""
    import tf_keras  # type: ignore[import-untyped]

    for name in task.models:
        train(task, tf_keras, name, task.global_data(name))


def horovod(task: Task) -> None:
    """Horovod's binding as its users write it, each rank on data of its own.

    Without its MetricAverageCallback, which asks Keras 3 for what only legacy Keras has.
    """
    import horovod.tensorflow.keras as hvd
    import tf_keras

    hvd.init()
    for name in task.models:
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        train(task, tf_keras, name, task.own_data(name), wrap=hvd.DistributedOptimizer, callbacks=[broadcast])


def multi_worker(task: Task) -> None:
    """MultiWorkerMirroredStrategy; the batch is that of all workers, and TensorFlow shares the data out."""
    import tensorflow as tf
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        for name in task.models:
            batch = MODELS[name].batch * strategy.num_replicas_in_sync
            train(task, tf_keras, name, task.global_data(name), batch=batch)
