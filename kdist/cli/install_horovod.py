"""`kdist install-horovod`: builds Horovod for the TensorFlow and MPI of this environment, installs and tests it."""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from typing import TYPE_CHECKING, Any

from kdist.errors import InstallError, KDistError
from kdist.install import prerequisites, programs, source, wheel
from kdist.install.prerequisites import Prerequisites
from kdist.install.verify import verify

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subcommands: _SubParsersAction[Any]) -> None:
    """Adds the subcommand to the command line.

    Args:
        subcommands: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow and the MPI of this environment, and install it",
        description="Build Horovod for the TensorFlow and the MPI of this environment, install it, and test it on two "
        "processes. Needs a C++ compiler and a package index; takes a few minutes.",
        allow_abbrev=False,
    )
    newest = list(source.SHA256)[-1]
    parser.add_argument(
        "--version", default=newest, help=f"one of {', '.join(source.SHA256)} (default: {newest})", metavar="VERSION"
    )
    parser.add_argument("--wheel-dir", metavar="DIR", help="keep the wheel in DIR, and use one that is already there")
    parser.add_argument("--gpu-operations", choices=["NCCL"], help="reduce on GPUs, over NCCL")
    parser.add_argument("--without-mpi", action="store_true", help="build with Gloo only")
    parser.add_argument("--force", action="store_true", help="build and install even if a working Horovod is installed")
    parser.set_defaults(subcommand=run)


def run(options: argparse.Namespace) -> int:
    """Builds, installs and tests Horovod.

    Args:
        options: the parsed arguments.

    Returns:
        0 if a working Horovod is installed.

    Raises:
        InstallError: if something is missing, the build fails, or it does not work.
    """
    source.requirement(options.version)
    found = prerequisites.find()
    with_mpi = not options.without_mpi
    for name, what in (
        ("TensorFlow", found.tensorflow),
        ("C++ compiler", found.compiler),
        ("CMake", "from the package index"),
        ("MPI", f"{found.mpi} ({found.mpicxx})" if with_mpi and found.mpi else "not used" if not with_mpi else None),
        *([("CUDA", found.cuda)] if options.gpu_operations else []),
    ):
        _print(f"{name:<13} {what or 'missing'}")
    if not options.force and _is_installed(options, found):
        return 0
    prerequisites.check(found, with_mpi=with_mpi, gpu_operations=options.gpu_operations)
    recipe = _recipe(options, found)
    with tempfile.TemporaryDirectory(prefix="kdist-wheel-") as temporary:
        directory = options.wheel_dir or temporary
        built = None if options.force else wheel.find_kept(recipe, directory)
        if built is not None:
            _print(f"using {built}")
        _install(built or wheel.build(recipe, directory, _print))
    _print("testing it on two processes")
    verify(with_mpi=with_mpi)
    _print(f"Horovod {recipe.full_version} is installed and works")
    return 0


def _recipe(options: argparse.Namespace, found: Prerequisites) -> wheel.Recipe:
    mpi = None if options.without_mpi else found.mpi
    return wheel.Recipe(options.version, found.tensorflow or "", mpi, options.gpu_operations)


def _is_installed(options: argparse.Namespace, found: Prerequisites) -> bool:
    """Returns whether the requested Horovod is installed and works."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return False
    recipe = _recipe(options, found)
    # One without a label was not built by kdist; it is kept if it works.
    is_foreign = version == options.version and options.gpu_operations is None
    if version != recipe.full_version and not is_foreign:
        _print(f"Horovod {version} is installed, not {recipe.full_version}")
        return False
    _print(f"Horovod {version} is installed: testing it on two processes")
    try:
        verify(with_mpi=not options.without_mpi)
    except KDistError as error:
        _print(f"it does not work: {error}")
        return False
    _print("it works and is kept; --force builds another one")
    return True


def _install(built: str) -> None:
    pip = [*programs.pip(), "install", "--quiet", "--disable-pip-version-check"]
    _print(f"installing {built}")
    try:
        programs.run([*pip, "--force-reinstall", "--no-deps", built])
        programs.run([*pip, built])  # its dependencies
    except InstallError as error:
        raise InstallError(f"The wheel of Horovod cannot be installed. {error}") from error


def _print(text: str) -> None:
    print(f"kdist install-horovod: {text}", flush=True)
