"""Copies of kdist's source, and what setuptools builds from them, as pip does it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.helpers import spmd


def copy_source(into: Path) -> Path:
    """Copies what a distribution is made of to a folder, for a build writes into its source; returns the folder."""
    into.mkdir(exist_ok=True)
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(spmd.ROOT / name, into)
    for name in ("kdist", "callbacks", "examples"):
        shutil.copytree(spmd.ROOT / name, into / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return into


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds a distribution of a source tree.

    Args:
        kind: str, `"wheel"`, `"sdist"` or `"editable"`, as in the names of the build backend's functions.
        source: path, the folder of the source.
        into: path, a folder that does not exist or is empty.

    Returns:
        The path of the one file that was built.
    """
    into.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(into)!r})"
    done = spmd.execute([sys.executable, "-c", code], cwd=source, timeout=120)
    assert done.returncode == 0, done.output
    (built,) = into.iterdir()
    return built
