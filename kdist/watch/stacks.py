"""The stacks of this process's threads, as text: another thread's frame objects are not safe to touch."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from typing import IO, NamedTuple

MAX_FRAMES = 100
"""`faulthandler`'s number of innermost frames of a thread; it leaves out threads, too, the oldest, after 100."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class Frame(NamedTuple):
    """A frame of a Python thread.

    Attributes:
        file: str, the path of its code.
        line: int, the line that it runs.
        name: str, the name of its function.
    """

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def stacks_of_threads() -> dict[int, list[Frame]]:
    """Returns the frames of the 100 newest Python threads, at most `MAX_FRAMES` of each, from the outermost on.

    Frame objects of another thread may be freed while this one follows `f_back`: while TensorFlow traced a function,
    that ended in a segmentation fault after some thousand stacks. `faulthandler` makes no such objects.

    Returns:
        A dict by the thread's identifier, as `threading.get_ident` returns it; empty where no file can be opened.
    """
    try:
        with _file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:
        return {}
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.fullmatch(line):
            frames.insert(0, Frame(_unescaped(frame[1]), int(frame[2]), _unescaped(frame[3])))
    return found


def _file() -> IO[bytes]:
    """Returns an empty file: `faulthandler` writes to a descriptor."""
    try:
        return open(os.memfd_create("kdist stacks"), "w+b")
    except (AttributeError, OSError):  # a Python built against glibc before 2.27 (conda's), or vm.memfd_noexec=2
        return tempfile.TemporaryFile()


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)
