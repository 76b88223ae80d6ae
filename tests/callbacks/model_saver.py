"""Has ModelCheckpoint save without end, in processes to be killed: `python -m tests.callbacks.model_saver FILE`.

For each number that it reads it forks a process, which goes on from that number and says each that is saved. Keras is
to run on NumPy here (`KERAS_BACKEND`), for the threads of a TensorFlow that computes would not survive the fork.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys

import keras
import numpy as np

from kdist.checkpoint.storage.whole_files import write_whole


def main(path: str) -> None:
    model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(500)])
    model.save = functools.partial(write_whole, None, model.save)  # as a scope of several ranks has it
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    checkpoint.set_model(model)
    checkpoint.on_epoch_end(0, {})  # the first is slow: it imports much
    for line in sys.stdin:
        child = os.fork()
        if not child:
            for number in itertools.count(int(line) + 1):
                model.set_weights([np.full(weight.shape, number) for weight in model.weights])
                checkpoint.on_epoch_end(number, {})
                print(f"{number}\n", end="", flush=True)  # in one write: it may be killed between two
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
