"""HOW DO WE TRAIN, in the terms of `tf.distribute`; the selection of a strategy."""
