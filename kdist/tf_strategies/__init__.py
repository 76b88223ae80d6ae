"""TensorFlow's own strategies, passed through: mirrored, TPU and the user's own."""
