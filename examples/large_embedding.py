"""A large embedding table, of which each process holds some rows: text by hashed pairs of words.

python examples/large_embedding.py
kdist run -np 2 examples/large_embedding.py

Sentences of the docstrings of Keras, NumPy and TensorFlow. Each pair of words is hashed to one of 100,000 rows. With N
processes, each holds 1/N of the table and of Adam's state for it. The script is the same with a table of any size.
"""

import argparse

import keras
import tensorflow as tf
from text_classifier import LIBRARIES, labelled_sentences

import kdist

NUM_ROWS, LENGTH = 100_000, 40


def to_ids(text: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of each pair of neighbouring words; row 0 stands for no pair."""
    words = tf.strings.split([text])
    pairs = tf.strings.ngrams(words, 2).to_tensor(shape=(1, LENGTH))[0]
    ids = 1 + tf.strings.to_hash_bucket_fast(pairs, NUM_ROWS - 1)
    return tf.where(pairs == "", tf.zeros_like(ids), ids), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    x, x_test, y, y_test = labelled_sentences()

    with kdist.scope(kdist.AllReduce(shard_embeddings=1e6)):
        train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).map(to_ids)
        test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).map(to_ids).batch(arguments.batch_size)
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int64"),
                keras.layers.Embedding(NUM_ROWS, 32, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(len(LIBRARIES), activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(train.batch(arguments.batch_size), epochs=arguments.epochs, validation_data=test)
        model.save("large_embedding.keras")  # on all processes: each sends its rows
        accuracy = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]
    if kdist.is_chief():
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
