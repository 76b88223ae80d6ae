"""WHERE DOES HOROVOD COME FROM: built from its source for the TensorFlow and the MPI of this environment."""
