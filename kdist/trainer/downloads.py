"""What `keras.utils.get_file` downloads and extracts in a scope, once a host."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kdist.checkpoint.storage.locks import file_lock
from kdist.keras_hooks.files import DOWNLOAD, EXTRACT, replaced


@contextlib.contextmanager
def once_a_host() -> Iterator[None]:
    """Makes `get_file`, and so `keras.datasets` and `keras.applications`, download once a host while it is open.

    The process that comes first does it, the others wait and take what it has left. No messages are sent: some ranks
    may do it alone.
    """
    with replaced(DOWNLOAD, _download), replaced(EXTRACT, _extract):
        yield


def _download(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    def urlretrieve(url: str, filename: str, *args: Any) -> tuple[str, Any]:
        _once(Path(filename), lambda scratch: retrieve(url, str(scratch), *args))
        return filename, None

    return urlretrieve


def _extract(extract: Callable[..., bool]) -> Callable[..., bool]:
    def extract_archive(file_path: str, path: str = ".", archive_format: Any = "auto") -> bool:
        is_archive = True

        def write(scratch: Path) -> None:
            nonlocal is_archive
            is_archive = extract(file_path, str(scratch), archive_format)

        _once(Path(path), write)
        return is_archive

    return extract_archive


def _once(target: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file or a directory, unless another process does so while this one waits for it."""
    before = _identity(target)
    with file_lock(target.with_name(f".{target.name}.lock")):
        if _identity(target) != before:
            return
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            written = Path(scratch, target.name)
            write(written)
            if written.exists():
                _put(written, target)
                os.utime(target)  # also if only files below it were replaced


def _put(source: Path, target: Path) -> None:
    """Moves a file, or the files of a directory one by one: another rank may be reading the same from an archive."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for each in source.iterdir():
            _put(each, target / each.name)


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None
