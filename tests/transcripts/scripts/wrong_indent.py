import keras
import numpy as np

import kdist

x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
with kdist.scope():
    first = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    first.compile("sgd", "mse")
    first.fit(x, y, batch_size=2, verbose=0)
first.fit(x, y, batch_size=2, verbose=0)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, batch_size=2, verbose=0)
model.fit(x, y, batch_size=2, verbose=0)
