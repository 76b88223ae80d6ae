"""The public interface of `tf.distribute.Strategy` in a custom training loop, for any rank and size."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def scope() -> Any:
    """A scope as users open it; learning rates are not scaled in a custom loop."""
    return kdist.scope(scale_lr=None)


def everywhere(value: Any) -> list[Any]:
    """Returns a JSON value of every rank."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(value)


def case_run_gives_each_replica_its_id() -> None:
    with scope() as strategy:
        assert strategy.num_replicas_in_sync == kdist.size()
        result = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
        assert int(result) == kdist.rank()
        assert int(tf.function(lambda: strategy.run(lambda a, b=0: a + b, (1,), {"b": 2}))()) == 3
        assert [int(v) for v in strategy.experimental_local_results(result)] == [kdist.rank()]
        assert tf.distribute.get_strategy() is strategy
        assert strategy.extended.should_checkpoint == (kdist.rank() == 0)


def case_reduce() -> None:
    size = kdist.size()
    own = tf.range(kdist.rank() + 1, dtype=tf.float64) + 1  # 1; 1, 2; 1, 2, 3; ...: ranks differ in length
    everyone = np.concatenate([np.arange(r + 1) + 1.0 for r in range(size)])
    with scope() as strategy:
        for wrap in (lambda f: f, tf.function):
            assert float(wrap(lambda: strategy.reduce(SUM, own[-1], axis=None))()) == sum(range(1, size + 1))
            assert float(wrap(lambda: strategy.reduce("MEAN", own[-1], axis=None))()) == (size + 1) / 2
            assert float(wrap(lambda: strategy.reduce(SUM, own, axis=0))()) == everyone.sum()
            np.testing.assert_allclose(wrap(lambda: strategy.reduce(MEAN, own, axis=0))(), everyone.mean(), rtol=1e-15)


def case_gather_with_unequal_lengths() -> None:
    rank, size = kdist.rank(), kdist.size()
    rows = [np.full((r + 1, 2), float(r)) for r in range(size)]
    with scope() as strategy:
        for wrap in (lambda f: f, tf.function):
            own = tf.constant(rows[rank])
            np.testing.assert_array_equal(wrap(lambda: strategy.gather(own, axis=0))(), np.concatenate(rows))  # noqa: B023
            columns = wrap(lambda: strategy.gather(tf.transpose(own), axis=1))()  # noqa: B023
            np.testing.assert_array_equal(columns, np.concatenate(rows).T)


def case_all_reduce_in_a_replica_and_its_gradient() -> None:
    rank, size = kdist.rank(), kdist.size()

    def replica() -> tuple[Any, Any, Any]:
        x = tf.constant([1.0 + rank, 2.0], tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(SUM, x)
            loss = (rank + 1.0) * tf.reduce_sum(total**2)
        mean = context.all_reduce(MEAN, {"a": x, "b": [2 * x]})
        return total, tape.gradient(loss, x), mean

    total = np.array([sum(range(1, size + 1)), 2.0 * size])
    with scope() as strategy:
        for run in (strategy.run, tf.function(lambda f: strategy.run(f))):
            got, gradient, mean = run(replica)
            np.testing.assert_array_equal(got, total)
            # The loss of every rank depends on this rank's x.
            np.testing.assert_allclose(gradient, sum(range(1, size + 1)) * 2 * total, rtol=1e-14)
            np.testing.assert_allclose(mean["a"], total / size, rtol=1e-15)
            np.testing.assert_allclose(mean["b"][0], 2 * total / size, rtol=1e-15)


def case_batch_statistics_behind_a_mask_in_a_replica() -> None:
    """Where all ranks' unmasked rows count alike, however many a rank has."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(kdist.size(), 4, 3)) + np.arange(kdist.size())[:, np.newaxis, np.newaxis]
    mask = np.arange(4) <= np.arange(kdist.size())[:, np.newaxis] % 4
    plain = keras.layers.BatchNormalization(dtype="float64")(x, training=True, mask=tf.constant(mask))
    mine = slice(kdist.rank(), kdist.rank() + 1)
    for wrap in (lambda f: f, tf.function):
        with scope() as strategy:
            layer = keras.layers.BatchNormalization(synchronized=True, dtype="float64")
            layer.build(x.shape)
            ours = wrap(lambda: strategy.run(lambda: layer(x[mine], training=True, mask=tf.constant(mask[mine]))))()  # noqa: B023
        np.testing.assert_allclose(ours, plain[mine], rtol=1e-6)


def case_all_gather_in_a_replica() -> None:
    size = kdist.size()
    with scope() as strategy:
        gathered = strategy.run(
            lambda: tf.distribute.get_replica_context().all_gather(tf.fill([kdist.rank() + 1], kdist.rank()), axis=0)
        )
    assert gathered.numpy().tolist() == [r for r in range(size) for _ in range(r + 1)]


def case_a_distributed_dataset_has_each_row_once() -> None:
    size = kdist.size()
    for num_rows in (4 * size, 4 * size - 1, 2 * 4 * size + 1):  # the last leaves most ranks without a row
        dataset = tf.data.Dataset.range(num_rows).batch(4 * size)
        with scope() as strategy:
            mine = [batch.numpy().tolist() for batch in strategy.experimental_distribute_dataset(dataset)]
        per_step = list(zip(*everywhere(mine), strict=True))  # every rank makes the same number of steps
        assert len(per_step) == -(-num_rows // (4 * size))
        together = [sorted(row for rank_rows in step for row in rank_rows) for step in per_step]
        assert together == [
            list(range(start, min(start + 4 * size, num_rows))) for start in range(0, num_rows, 4 * size)
        ]


def case_a_dataset_that_is_distributed_in_each_epoch() -> None:
    """An unseeded shuffle has another order in each, as in one process."""
    num_rows = 10 * kdist.size()
    dataset = tf.data.Dataset.range(num_rows).shuffle(num_rows).batch(2 * kdist.size())
    epochs = []
    with scope() as strategy:
        for _ in range(2):
            shared = strategy.experimental_distribute_dataset(dataset)
            epochs.append(everywhere([row for batch in shared for row in batch.numpy().tolist()]))
    assert all(sorted(row for rows in ranks for row in rows) == list(range(num_rows)) for ranks in epochs)
    assert epochs[0] != epochs[1]


def case_a_distributed_dataset_of_each_ranks_own() -> None:
    """With `AutoShardPolicy.OFF` or `auto_shard=False` nothing is taken away, and the loop ends with the data."""
    rank, size = kdist.rank(), kdist.size()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    mine = tf.data.Dataset.range(5 * size).shard(size, rank).batch(2)
    expected = [batch.numpy().tolist() for batch in mine]
    for dataset, context in (
        (mine.with_options(options), scope()),
        (mine, kdist.scope(auto_shard=False)),
    ):
        with context as strategy:
            shared = strategy.experimental_distribute_dataset(dataset)
            assert [batch.numpy().tolist() for batch in shared] == expected


def case_datasets_and_values_from_functions() -> None:
    rank, size = kdist.rank(), kdist.size()

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (size, rank)
        batch = context.get_per_replica_batch_size(2 * size)
        return tf.data.Dataset.range(4 * size).shard(size, rank).batch(batch)

    with scope() as strategy:
        batches = [b.numpy().tolist() for b in strategy.distribute_datasets_from_function(make)]
        value = strategy.experimental_distribute_values_from_function(lambda c: 10 * c.replica_id_in_sync_group)
    assert batches == [[rank, rank + size], [rank + 2 * size, rank + 3 * size]]
    assert value == 10 * rank


def case_variables_are_plain() -> None:
    with scope() as strategy:
        variable = tf.Variable(1.0)
        weight = keras.Variable(np.ones(2))
    for each in (variable, weight.value):
        assert type(each) is type(tf.Variable(1.0))
        assert not isinstance(each, tf.distribute.DistributedValues)
    # Reading and assigning never communicate: the chief may do it alone.
    if strategy.extended.should_checkpoint:
        variable.assign_add(float(variable))


def case_summaries_come_from_the_chief() -> None:
    with tempfile.TemporaryDirectory() as directory, scope() as strategy:
        writer = tf.summary.create_file_writer(directory)

        def replica() -> None:
            with writer.as_default(step=0):
                tf.summary.write("x", 1.0)  # what tf.summary.scalar calls, which needs TensorBoard

        strategy.run(replica)
        writer.close()
        records = [r for f in Path(directory).glob("*") for r in tf.data.TFRecordDataset(str(f))]
    assert len(records) - 1 == (kdist.rank() == 0)  # but for the file's version


# The loop of https://www.tensorflow.org/tutorials/distribute/custom_training


def train(strategy: tf.distribute.Strategy, optimizer: Any, num_rows: int, directory: str | None = None) -> Any:
    """Trains as in TensorFlow's guide; with a directory restores a checkpoint midway. Returns weights and losses."""
    global_batch_size, epochs = 6, 3
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(num_rows, 5)), generator.integers(0, 3, num_rows)
    train_dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(num_rows, seed=1).batch(global_batch_size)
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def compute_loss(labels: Any, predictions: Any, model_losses: Any) -> Any:
            per_example_loss = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=global_batch_size)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
                keras.layers.Dense(3),
            ]
        )
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(2).normal(size=variable.shape))
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(dataset_inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    losses = []
    for epoch in range(epochs):
        losses += [float(distributed_train_step(inputs)) for inputs in train_dist_dataset]
        if directory and epoch == 1:
            path = tf.train.Checkpoint.write(checkpoint, f"{directory}/midway")
            kept = [v.numpy() for v in model.variables]
            for variable in [*model.variables, *optimizer.variables]:
                variable.assign(tf.zeros_like(variable.value))
            checkpoint.read(path).assert_consumed()
            for variable, value in zip(model.variables, kept, strict=True):
                np.testing.assert_array_equal(variable, value)
    return [np.asarray(v) for v in [*model.variables, *optimizer.variables]], losses


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def both_loops(make_optimizer: Any, num_rows: int, checkpoint: bool = False) -> None:
    """Runs the loop under TensorFlow's default strategy and under kdist's, and compares."""
    keras.config.set_floatx("float64")
    weights, losses = train(tf.distribute.get_strategy(), make_optimizer(), num_rows)
    with tempfile.TemporaryDirectory() as directory, scope() as strategy:
        ours, our_losses = train(strategy, make_optimizer(), num_rows, directory if checkpoint else None)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-10)
    for one, other in zip(weights, ours, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9 * np.max(np.abs(one), initial=0))


def case_the_guides_loop_with_sgd() -> None:
    both_loops(OPTIMIZERS["sgd"], 12)


def case_the_guides_loop_with_adam_and_ragged_batches() -> None:
    both_loops(OPTIMIZERS["adam"], 13)  # one row in the last step: the other ranks have none


def case_the_guides_loop_through_a_checkpoint() -> None:
    both_loops(OPTIMIZERS["adam"], 12, checkpoint=True)


def case_an_update_with_a_scaled_loss_is_taken_by_all_or_none() -> None:
    """Keras checks whether gradients are finite before it sums them, on each rank."""
    for wrap in (lambda f: f, tf.function):
        with scope() as strategy:
            weight = keras.Variable([0.0])
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
            optimizer.build([weight])
            step = wrap(lambda gradient: strategy.run(lambda g: optimizer.apply([g], [weight]), (gradient,)))  # noqa: B023
            for overflows in (-1, kdist.size() - 1, -1, 0):
                step(tf.constant([np.inf if kdist.rank() == overflows else 8.0]))
                strategy.reduce(SUM, 1.0, axis=None)
            # One update at a scale of 4 and, after an overflow, one at 2.
            assert float(weight.value[0]) == -(2.0 + 4.0) * kdist.size()
            assert (float(optimizer.dynamic_scale), int(optimizer.iterations)) == (1.0, 2)


def case_clipping_comes_before_the_sum() -> None:
    """As under TensorFlow's strategies: a custom loop clips each replica's own gradient, while `fit` clips the sum."""
    keras.config.set_floatx("float64")
    with scope() as strategy:
        variable = keras.Variable(np.zeros(1))
        optimizer = keras.optimizers.SGD(1.0, clipnorm=1.0)
        optimizer.build([variable])
        strategy.run(lambda: optimizer.apply([tf.constant([100.0], tf.float64)], [variable]))
    np.testing.assert_allclose(variable, [-1.0 * kdist.size()])
