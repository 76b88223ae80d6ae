"""WHERE DOES HOROVOD COME FROM: built from source for the TensorFlow and the MPI of this environment."""
