import time

import keras
import numpy as np

import kdist

x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


def batches():
    for step in range(1000):
        if step == 2 and kdist.rank() == 1:
            time.sleep(1000)
        yield x, y


with kdist.scope(stall_timeout=8):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(batches(), steps_per_epoch=1000, verbose=0)
