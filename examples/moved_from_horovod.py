"""A script that was Horovod's, moved to kdist: it still asks for its rank, and still runs under horovodrun.

horovodrun --gloo -np 2 python examples/moved_from_horovod.py
mpirun -np 2 python examples/moved_from_horovod.py
KDIST_STRATEGY=horovod mpirun -np 2 python examples/moved_from_horovod.py
python examples/moved_from_horovod.py
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kdist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="rows that each process takes in a step")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    with kdist.chief_first():  # was: a file for each rank
        images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)

    # Was: hvd.init(), and a GPU by hvd.local_rank(). Horovod's rule was linear, and its warm-up a callback.
    with kdist.scope(scale_lr="linear", warmup_epochs=3):
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),  # was: hvd.DistributedOptimizer(SGD(0.05 * hvd.size()))
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        # Was: four callbacks of Horovod's, steps // hvd.size(), and verbose=0 on all ranks but the first.
        model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs)
        result = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if kdist.rank() == 0:  # was: hvd.rank()
        print(f"test accuracy: {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
