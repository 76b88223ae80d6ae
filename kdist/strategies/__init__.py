"""How ranks train together, in the terms of `tf.distribute`; the selection of a strategy."""
