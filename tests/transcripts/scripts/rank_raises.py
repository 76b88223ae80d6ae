import keras
import numpy as np

import kdist

x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


class Logs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if kdist.rank() == 1:
            raise ValueError("no such directory")


with kdist.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[Logs()])
