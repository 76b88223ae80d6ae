"""Files that are complete as soon as they have their names."""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdist.checkpoint.storage.locks import file_lock
from kdist.state.versions import MODULUS

_PATHS = ("filepath", "export_dir")
_FILES = (".keras", ".h5", ".hdf5", ".json")  # whose directories Keras does not make

VersionOf = Callable[[Path], int]


def write_whole(version_of: VersionOf | None, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Writes under a temporary name in the same directory, and renames the result when it is complete.

    A reader finds the old content or all of the new, also if several ranks write the same file at once. An incomplete
    file, after a full disk or a kill, never replaces the old one. A symbolic link stays: what it leads to is replaced.
    What else is in a directory stays, too: such a directory gets the new entries one by one.

    Args:
        version_of: callable that returns the version of this rank's write, of a path. A directory that already has it
            is left alone: another rank has written the same, and may be reading it. So is a file with
            `overwrite=False`: Keras would ask whether to replace it. `None` to replace directories always.
        write: callable with a parameter `filepath` or `export_dir`: a file or a directory, or the first of several
            files.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    bound = inspect.signature(write).bind(*args, **kwargs)
    parameter = next((name for name in _PATHS if name in bound.arguments), "")
    if not isinstance(bound.arguments.get(parameter), (str, os.PathLike)):
        return write(*args, **kwargs)  # an open file, or a user's method, which calls one of Keras' or writes by itself
    path = os.fspath(bound.arguments[parameter])
    folder, name = os.path.split(path.rstrip(os.sep))
    own = _behind_links(folder, name)
    has_folder = own.parent.is_dir() or not name.endswith(_FILES)  # or Keras makes it
    if "://" in path or not name or not has_folder or (os.path.islink(path) and not _may_replace(own)):
        return write(*args, **kwargs)
    asks = bound.arguments.get("overwrite") is False
    # Counted once for each write of a rank, also where it finds the file of another.
    version = version_of(own) if asks and version_of is not None else None
    if asks and os.path.exists(path):
        return None if version is not None and _version(own) == version else write(*args, **kwargs)
    own.parent.mkdir(parents=True, exist_ok=True)
    is_fixed = own.is_dir() and (os.path.ismount(own) or not os.access(own.parent, os.W_OK))
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=own if is_fixed else own.parent) as scratch:
        bound.arguments[parameter] = os.path.join(scratch, name)
        result = write(*bound.args, **bound.kwargs)
        # The index of a sharded model comes last.
        for each in sorted(os.listdir(scratch), key=lambda each: (each == name, each)):
            source, target = Path(scratch, each), _behind_links(folder, each)
            if source.is_dir():
                known = version if target == own else None
                known = version_of(target) if known is None and version_of is not None else known
                _put(source, target, known, is_fixed=target == own and is_fixed)
            else:
                if target == own:
                    _mark(source, version)
                os.replace(source, target)
    return result


def _behind_links(folder: str, name: str) -> Path:
    """Returns where a file or directory is, or will be: a rename would replace a link, and not what it leads to."""
    return Path(os.path.realpath(os.path.join(folder, name)))


def _may_replace(path: Path) -> bool:
    """Returns whether a file is not read-only, nor its directory; one that is not there yet may be made."""
    is_writable = not path.exists() or os.access(path, os.W_OK)
    return is_writable and (not path.parent.is_dir() or os.access(path.parent, os.W_OK))


def _mark(path: Path, version: int | None) -> None:
    """Keeps a version as the fraction of a second of the time of change: what is saved has no file of kdist's."""
    if version is not None:
        os.utime(path, ns=(time.time_ns(), time.time_ns() // MODULUS * MODULUS + version))


def _put(source: Path, target: Path, version: int | None, *, is_fixed: bool) -> None:
    """Moves a directory to its name, unless the directory of that name has the same version.

    Where a file system keeps no fractions of a second the directory is replaced. One that has other entries than the
    new one, or that cannot be renamed, keeps its place, and gets the new entries one by one.
    """
    entries = sorted(os.listdir(source), key=lambda each: ((source / each).is_dir(), each))
    for each in (*(source / name for name in entries[:1]), source):
        _mark(each, version)
    with file_lock((target if is_fixed else target.parent) / f".{target.name}.lock"):
        while version is None or not _has_version(target, entries, version):
            try:
                if not is_fixed:
                    os.rename(source, target)
                    return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with (
                tempfile.TemporaryDirectory(
                    prefix=f".{target.name}-", dir=target if is_fixed else target.parent
                ) as old,
                contextlib.suppress(FileNotFoundError),
            ):  # where nothing is locked another rank may do the same
                if not is_fixed and set(os.listdir(target)) <= set(entries):
                    os.rename(target, Path(old, "replaced"))
                    continue
                for name in reversed(entries):  # the one that tells the version comes last
                    _move(source / name, target / name, Path(old))
                return


def _has_version(target: Path, entries: Sequence[str], version: int) -> bool:
    """Returns whether a directory has a version, or its first entry, where others change the directory's time."""
    return version in (_version(target), *(_version(target / name) for name in entries[:1]))


def _move(source: Path, target: Path, old: Path) -> None:
    """Moves a file or directory to its name; what had it goes to another directory."""
    for number in itertools.count():
        try:
            os.rename(source, target)
            return
        except OSError as error:
            if not os.path.lexists(source):  # moved before the directory was replaced by another rank's
                return
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR):
                raise
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, old / f"{target.name}-{number}")


def _version(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns % MODULUS
    return None
