"""Files that are complete as soon as they have their names."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdist.checkpoint.file_lock import file_lock
from kdist.state.versions import MODULUS

_PATHS = ("filepath", "export_dir")
_FILES = (".keras", ".h5", ".hdf5", ".json")  # whose directories Keras does not make

VersionOf = Callable[[Path], int]


def write_whole(version_of: VersionOf | None, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Writes under a temporary name in the same directory, and renames the result when it is complete.

    A reader finds the old content or all of the new, also if several ranks write the same file at once. An incomplete
    file, after a full disk or a kill, never replaces the old one.

    Args:
        version_of: callable that returns the version of this rank's write, of the path of a directory. A directory
            that already has it is left alone: another rank has written the same, and may be reading it. `None` to
            replace directories always.
        write: callable with a parameter `filepath` or `export_dir`: a file or a directory, or the first of several
            files.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    bound = inspect.signature(write).bind(*args, **kwargs)
    parameter = next(name for name in _PATHS if name in bound.arguments)
    if not isinstance(bound.arguments[parameter], (str, os.PathLike)):
        return write(*args, **kwargs)  # an open file
    path = os.fspath(bound.arguments[parameter])
    folder, name = os.path.split(path.rstrip(os.sep))
    asks_before = bound.arguments.get("overwrite") is False and os.path.exists(path)
    has_folder = os.path.isdir(folder or ".") or not name.endswith(_FILES)  # or Keras makes it
    if "://" in path or not name or asks_before or not has_folder:
        return write(*args, **kwargs)
    os.makedirs(folder or ".", exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder or ".") as scratch:
        bound.arguments[parameter] = os.path.join(scratch, name)
        result = write(*bound.args, **bound.kwargs)
        # The index of a sharded model comes last.
        for each in sorted(os.listdir(scratch), key=lambda each: (each == name, each)):
            source, target = Path(scratch, each), Path(folder, each)
            if source.is_dir():
                _put(source, target, None if version_of is None else version_of(target))
            else:
                os.replace(source, target)
    return result


def _put(source: Path, target: Path, version: int | None) -> None:
    """Moves a directory to its name, unless the directory of that name has the same version.

    The version is kept as the fraction of a second of the time of change: what is saved has no file of kdist's. Where
    a file system keeps no fractions the directory is replaced.
    """
    if version is not None:
        os.utime(source, ns=(time.time_ns(), time.time_ns() // MODULUS * MODULUS + version))
    with file_lock(target.with_name(f".{target.name}.lock")):
        while version is None or _version(target) != version:
            try:
                os.rename(source, target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as old:
                with contextlib.suppress(FileNotFoundError):  # where nothing is locked another rank may do the same
                    os.rename(target, Path(old, "replaced"))


def _version(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns % MODULUS
    return None
