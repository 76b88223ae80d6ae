"""Horovod's source distribution: downloaded from the package index, verified, and patched."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from typing import NamedTuple

from kdist.errors import InstallError
from kdist.install import programs

SHA256 = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
"""The supported versions, each with the SHA-256 of its source distribution."""

REVISION = 2
"""The version of the patches below: a kept wheel with another one is not used."""


class Patch(NamedTuple):
    """A patch of one line of Horovod's source.

    Attributes:
        path: tuple of str, the file, relative to the directory with `setup.py`.
        mark: str, a text that only that line contains.
        old: str, the text of the line to replace; `""` removes the line.
        new: str, the replacement.
    """

    path: tuple[str, ...]
    mark: str
    old: str = ""
    new: str = ""


_FIX = "Fix: choose a version that `kdist install-horovod --help` lists."

PATCHES = (
    # It includes XLA headers that TensorFlow no longer ships. Only HOROVOD_ENABLE_XLA_OPS=1 uses it.
    Patch(("horovod", "tensorflow", "CMakeLists.txt"), "xla_mpi_ops.cc"),
    # Options of mpirun: Open MPI 5 takes `-bind-to` for the program to run. MPICH accepts both.
    Patch(
        ("horovod", "runner", "mpi_run.py"),
        "_NO_BINDING_ARGS = ",
        "['-bind-to none', '-map-by slot']",
        "['--bind-to none', '--map-by slot']",
    ),
)


def download(version: str, directory: str, run: Callable[[list[str]], str] = programs.run) -> str:
    """Downloads a version's source and patches it.

    Args:
        version: str, one of `SHA256`.
        directory: str, an existing directory for it.
        run: function that runs a command.

    Returns:
        The directory with Horovod's `setup.py`, a str.

    Raises:
        InstallError: if it cannot be downloaded, verified, or patched.
    """
    requirements = os.path.join(directory, "requirements.txt")
    with open(requirements, "w") as file:
        file.write(requirement(version))
    # pip rejects a file with another hash.
    options = ["--require-hashes", "--no-deps", "--no-binary", ":all:", "--no-cache-dir", "-r", requirements]
    run([*programs.pip(), "download", "--quiet", "--disable-pip-version-check", *options, "-d", directory])
    archive = os.path.join(directory, f"horovod-{version}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(directory)
    source = os.path.join(directory, f"horovod-{version}")
    for patch in PATCHES:
        _apply(patch, source)
    return source


def requirement(version: str) -> str:
    """Returns the requirement with which pip downloads a version's source and no other file.

    Raises:
        InstallError: if the version is not supported.
    """
    if version not in SHA256:
        raise InstallError(
            f"This version of Horovod is not supported. Received: --version {version}. Expected one of "
            f"{', '.join(SHA256)}. Fix: choose one of these, or omit --version."
        )
    return f"horovod=={version} --hash=sha256:{SHA256[version]}\n"


def _apply(patch: Patch, source: str) -> None:
    path = os.path.join(source, *patch.path)
    try:
        with open(path) as file:
            lines = file.readlines()
    except OSError as err:
        raise InstallError(
            f"Horovod's source cannot be patched. Received: {err}. Expected the file {path}. {_FIX}"
        ) from err
    found = [number for number, line in enumerate(lines) if patch.mark in line and patch.old in line]
    if len(found) != 1:
        raise InstallError(
            f"Horovod's source cannot be patched. Received: {len(found)} lines of {path} with {patch.mark}{patch.old}. "
            f"Expected one. {_FIX}"
        )
    [number] = found
    lines[number] = lines[number].replace(patch.old, patch.new) if patch.old else ""
    with open(path, "w") as file:
        file.writelines(lines)
