"""What engines over TensorFlow share: checks of arguments, tensors as buffers, Python functions in graphs."""
