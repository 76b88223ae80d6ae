import keras
import tensorflow as tf

import kdist

with kdist.scope():
    data = tf.data.Dataset.from_tensor_slices((tf.ones([4, 3]), tf.ones([4, 1]))).cache("no-such-cache").batch(2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data, verbose=0)
