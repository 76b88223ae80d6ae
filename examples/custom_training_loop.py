"""A custom training loop for `tf.distribute`, as in TensorFlow's guide; only the strategy comes from kdist.

    python examples/custom_training_loop.py
    kdist run -np 2 examples/custom_training_loop.py
    mpirun -np 2 python examples/custom_training_loop.py

Here `tf.distribute`'s rules hold, not those of `fit`: the dataset has *global* batches, each replica gets its rows of
one, divides its loss by the global batch size, and the optimizer sums the gradients over the replicas.
https://www.tensorflow.org/tutorials/distribute/custom_training
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a global batch")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(arguments.batch_size)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(arguments.batch_size)

    with kdist.scope() as strategy:
        train = strategy.experimental_distribute_dataset(train)
        test = strategy.experimental_distribute_dataset(test)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                losses = loss_object(labels, logits)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=arguments.batch_size)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        def test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            predicted = tf.argmax(model(images, training=False), axis=1, output_type=labels.dtype)
            return tf.reduce_sum(tf.cast(predicted == labels, tf.int32))

        @tf.function
        def distributed_train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            per_replica_losses = strategy.run(train_step, args=(images, labels))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

        @tf.function
        def distributed_test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            per_replica_hits = strategy.run(test_step, args=(images, labels))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_hits, axis=None)

        for epoch in range(arguments.epochs):
            total_loss, num_batches = 0.0, 0
            for batch in train:
                total_loss += float(distributed_train_step(*batch))
                num_batches += 1
            hits = sum(int(distributed_test_step(*batch)) for batch in test)
            if kdist.is_chief():
                print(f"epoch {epoch + 1}: loss {total_loss / num_batches:.4f}, {num_batches} steps")
    if kdist.is_chief():
        print(f"test accuracy: {hits / len(x_test):.3f}")


if __name__ == "__main__":
    main()
