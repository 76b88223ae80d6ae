"""Text: which library a sentence of documentation comes from, Keras, NumPy or TensorFlow.

python examples/text_classifier.py
kdist run -np 2 examples/text_classifier.py

The sentences are those of the three libraries' docstrings. They are sorted, so that all processes have the same ones in
the same order; a Python set has another order in each process.
"""

import argparse
import inspect
import re
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf
from sklearn.model_selection import train_test_split

import kdist

LIBRARIES = {
    "keras": [keras.layers, keras.losses, keras.metrics, keras.ops, keras.optimizers, keras.callbacks],
    "numpy": [np, np.fft, np.linalg, np.ma, np.random],
    "tensorflow": [tf, tf.data, tf.image, tf.io, tf.strings],
}


def sentences(modules: list[ModuleType]) -> list[str]:
    """Returns the sentences of five words or more that introduce the modules' functions and classes."""
    found = set()
    for module in modules:
        members = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
        for text in [inspect.getdoc(member) or "" for member in members if callable(member)]:
            # What follows is lists of arguments and examples.
            (introduction, *_) = re.split(
                r"\n(?:Parameters|Args|Arguments|Returns|Examples?|References|See Also)\b", text
            )
            for paragraph in introduction.split("\n\n"):
                found.update(re.split(r"(?<=[.:]) ", " ".join(paragraph.split())))
    return sorted(sentence for sentence in found if len(sentence.split()) >= 5)


def labelled_sentences() -> list[list]:
    """Returns sentences to train and to test with, and the numbers of their libraries: `x, x_test, y, y_test`."""
    by_library = [sentences(modules) for modules in LIBRARIES.values()]
    texts = [sentence for found in by_library for sentence in found]
    labels = [label for label, found in enumerate(by_library) for _ in found]
    return train_test_split(texts, labels, test_size=0.2, random_state=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    x, x_test, y, y_test = labelled_sentences()

    with kdist.scope():
        vectorize = keras.layers.TextVectorization(max_tokens=5000, output_sequence_length=40)
        vectorize.adapt(x)
        train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(arguments.batch_size)
        test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(arguments.batch_size)
        train, test = (part.map(lambda text, label: (vectorize(text), label)) for part in (train, test))
        model = keras.Sequential(
            [
                keras.layers.Embedding(vectorize.vocabulary_size(), 32, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(len(LIBRARIES)),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.005),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(train, epochs=arguments.epochs, validation_data=test)
        result = model.evaluate(test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
