"""Horovod's source distribution: got from the package index, checked, and changed in the places where it must be."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from typing import NamedTuple

from kdist.errors import InstallError
from kdist.install import programs

SHA256 = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
"""The versions that are known, each with the SHA-256 of its source distribution."""

REVISION = 2
"""The number of the set of changes below: a wheel that was kept with another is not taken."""


class Change(NamedTuple):
    """A line of Horovod's source that is written otherwise.

    Attributes:
        path: tuple of str, the file, from the directory with `setup.py`.
        mark: str, what that one line of it contains.
        old: str, what of the line is written otherwise; `""` for a line that is left out.
        new: str.
    """

    path: tuple[str, ...]
    mark: str
    old: str = ""
    new: str = ""


CHANGES = (
    # It includes XLA headers that TensorFlow no longer ships. Only HOROVOD_ENABLE_XLA_OPS=1 uses it.
    Change(("horovod", "tensorflow", "CMakeLists.txt"), "xla_mpi_ops.cc"),
    # What horovodrun says to mpirun: Open MPI 5 takes `-bind-to` for the program to run. MPICH reads both.
    Change(
        ("horovod", "runner", "mpi_run.py"),
        "_NO_BINDING_ARGS = ",
        "['-bind-to none', '-map-by slot']",
        "['--bind-to none', '--map-by slot']",
    ),
)


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
    for change in CHANGES:
        _apply(change, source)
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


def _apply(change: Change, source: str) -> None:
    path = os.path.join(source, *change.path)
    try:
        with open(path) as file:
            lines = file.readlines()
    except OSError as err:
        raise InstallError(f"Horovod's source is not as known. Received: {err}. Expected {path}.") from err
    found = [number for number, line in enumerate(lines) if change.mark in line and change.old in line]
    if len(found) != 1:
        raise InstallError(
            f"Horovod's source is not as known. Received: {len(found)} lines of {path} that say "
            f"{change.mark}{change.old}. Expected one. Fix: choose a version that `kdist install-horovod --help` names."
        )
    [number] = found
    lines[number] = lines[number].replace(change.old, change.new) if change.old else ""
    with open(path, "w") as file:
        file.writelines(lines)
