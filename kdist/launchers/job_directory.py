"""The directory of a running job, `/tmp/kdist-*`, and the removal of those whose `kdist run` was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kdist.errors import LaunchError
from kdist.restarts import request

_PREFIX = "kdist-"
_OWNER = "owner.json"
_RENEWAL = 3600.0  # seconds; systems remove what has not been used for days from /tmp


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process, told apart from any later one with the same id.

    Attributes:
        host: str, its host's name: hosts may share a directory.
        namespace: str, that of its process ids: so may containers.
        boot: str, a name of the host's boot.
        pid: int, its id.
        began: int, when it began, in ticks since the boot.
    """

    host: str
    namespace: str
    boot: str
    pid: int
    began: int

    @classmethod
    def of_this_process(cls) -> Owner:
        """Returns this process; raises `OSError` or `ValueError` where `/proc` does not tell."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(platform.node(), os.readlink("/proc/self/ns/pid"), boot, os.getpid(), _begin(os.getpid()))

    def is_gone(self, now: Owner) -> bool:
        """Returns whether it is known to have ended.

        Args:
            now: `Owner`, the process that asks.
        """
        if (self.host, self.namespace) != (now.host, now.namespace):
            return False
        if self.boot != now.boot:
            return True
        try:
            return _begin(self.pid) != self.began
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False


@contextlib.contextmanager
def job_directory() -> Iterator[str]:
    """Yields a new directory for a job, and removes it afterwards; before that, those that killed jobs have left.

    Raises:
        LaunchError: if there is no place for it.
    """
    now: Owner | None = None
    with contextlib.suppress(OSError, ValueError):
        now = Owner.of_this_process()
        _remove_abandoned(now)
    try:
        directory = tempfile.TemporaryDirectory(prefix=_PREFIX)
    except OSError as error:
        raise LaunchError(
            f"The directory of the job cannot be made. Received: {error}. Expected a temporary directory that can be "
            "written to, with free space. Fix: free some, or set TMPDIR to another directory."
        ) from error
    with directory as path:
        if now is not None:
            with contextlib.suppress(OSError):  # a full disk: what a kill leaves is small then
                Path(path, _OWNER).write_text(json.dumps(dataclasses.asdict(now)))
        with _renewed(Path(path)):
            yield path


@contextlib.contextmanager
def _renewed(directory: Path) -> Iterator[None]:
    """Sets the times of a directory and of its files now and then, which a long job writes once."""
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(_RENEWAL):
            with contextlib.suppress(OSError):
                for each in (directory, *directory.iterdir()):
                    os.utime(each)

    threading.Thread(target=renew, name="kdist-files", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def _remove_abandoned(now: Owner) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # of another user, or of something else
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            if Owner(**json.loads((path / _OWNER).read_text())).is_gone(now):
                request.remove(path)
                shutil.rmtree(path)


def _begin(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
