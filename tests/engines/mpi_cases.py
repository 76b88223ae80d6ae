"""What is MPI's own: cases for any number of ranks under mpirun."""

from kdist.engines.mpi import MPIEngine


def engine():
    return MPIEngine()
