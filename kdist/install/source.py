"""Horovod's source distribution: got from the package index, checked, and changed in the one place where it must be."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable

from kdist.errors import InstallError
from kdist.install import programs

SHA256 = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
"""The versions that are known, each with the SHA-256 of its source distribution."""

# It includes XLA headers that TensorFlow no longer ships. Only HOROVOD_ENABLE_XLA_OPS=1 uses it.
_LEFT_OUT = "xla_mpi_ops.cc"
_LISTED_IN = ("horovod", "tensorflow", "CMakeLists.txt")


def get(version: str, directory: str, run: Callable[[list[str]], str] = programs.run) -> str:
    """Gets a version's source, ready to be built.

    Args:
        version: str, one of `SHA256`.
        directory: str, an existing directory that takes it.
        run: function that runs a command.

    Returns:
        The directory with Horovod's `setup.py`, a str.

    Raises:
        InstallError: if it cannot be downloaded, is not what is expected, or cannot be changed.
    """
    requirements = os.path.join(directory, "requirements.txt")
    with open(requirements, "w") as file:
        file.write(requirement(version))
    # pip itself refuses a file of another hash.
    what = ["--require-hashes", "--no-deps", "--no-binary", ":all:", "--no-cache-dir", "-r", requirements]
    run([*programs.pip(), "download", "--quiet", "--disable-pip-version-check", *what, "-d", directory])
    archive = os.path.join(directory, f"horovod-{version}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(directory)
    source = os.path.join(directory, f"horovod-{version}")
    _leave_out_xla(source)
    return source


def requirement(version: str) -> str:
    """Returns the line by which pip gets a version's source and no other file.

    Raises:
        InstallError: if the version is not known.
    """
    if version not in SHA256:
        raise InstallError(
            f"An unknown version of Horovod. Received: --version {version}. Expected one whose source is known: "
            f"{', '.join(SHA256)}. Fix: choose one of these, or leave --version out."
        )
    return f"horovod=={version} --hash=sha256:{SHA256[version]}\n"


def _leave_out_xla(source: str) -> None:
    """Takes the file that current TensorFlow cannot compile out of what is built."""
    path = os.path.join(source, *_LISTED_IN)
    try:
        with open(path) as file:
            lines = file.readlines()
    except OSError as err:
        raise InstallError(f"Horovod's source is not as known. Received: {err}. Expected {path}.") from err
    kept = [line for line in lines if _LEFT_OUT not in line]
    if len(kept) != len(lines) - 1:
        raise InstallError(
            f"Horovod's source is not as known. Received: {len(lines) - len(kept)} lines of {path} that name "
            f"{_LEFT_OUT}. Expected one. Fix: choose a version that `kdist install-horovod --help` names."
        )
    with open(path, "w") as file:
        file.writelines(kept)
