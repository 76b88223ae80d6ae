"""A custom training step: digits that are also recognised when every pixel is pushed a little the wrong way.

    python examples/custom_train_step.py
    kdist run -np 2 examples/custom_train_step.py
    mpirun -np 2 python examples/custom_train_step.py

The training step is adversarial (Goodfellow et al., 2015, "Explaining and harnessing adversarial examples"). It knows
nothing of several processes: `self.optimizer.apply` gets the gradients of the global batch on all of them.
"""

import argparse
from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist

STRENGTH = 0.1  # of a pixel's range


class RobustClassifier(keras.Model):
    """An MLP that trains on the images' worst neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(128, activation="relu")
        self.logits = keras.layers.Dense(10)

    def call(self, images: Any) -> Any:
        """Returns a logit for each digit."""
        return self.logits(self.hidden(images))

    def train_step(self, data: Any) -> dict[str, Any]:
        """Takes one step on the batch's worst neighbours."""
        images, labels = data
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = self.compute_loss(x=images, y=labels, y_pred=self(images, training=True))
        worst = images + STRENGTH * tf.sign(tape.gradient(loss, images))

        with tf.GradientTape() as tape:
            predictions = self(worst, training=True)
            loss = self.compute_loss(x=worst, y=labels, y_pred=predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)

        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, predictions)
        return {metric.name: metric.result() for metric in self.metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)

    with kdist.scope():
        model = RobustClassifier()
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs, validation_data=(x_test, y_test))
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.is_chief():
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
