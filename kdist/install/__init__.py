"""The installation of Horovod: built from source for the TensorFlow and the MPI of this environment."""
