"""Mixed precision: the layers compute in 16 bits, the variables stay in 32, and the loss is scaled.

python examples/mixed_precision.py
kdist run -np 2 examples/mixed_precision.py
kdist run -np 2 examples/mixed_precision.py --policy mixed_bfloat16

With float16 small gradients would be zero: Keras multiplies the loss, and leaves out a step whose gradients overflow.
All processes leave out the same steps. It is fast on GPUs; on a CPU it only works.
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    parser.add_argument("--policy", default="mixed_float16", choices=["mixed_float16", "mixed_bfloat16", "float32"])
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(arguments.policy)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)

    with kdist.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10, dtype="float32"),  # a loss of 16 bits would be too coarse
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs, validation_data=(x_test, y_test))
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}, by {type(model.optimizer).__name__}")


if __name__ == "__main__":
    main()
