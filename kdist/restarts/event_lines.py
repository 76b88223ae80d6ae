"""Takes events out of a launcher's standard error, and keeps the end of what it says."""

from __future__ import annotations

import re
from typing import Protocol

from kdist.restarts.events import LINE_PREFIX

_KEPT_BYTES = 1 << 16  # of what the launcher says
_MAX_BEFORE = 30  # bytes that the regular expression allows before the prefix

# horovodrun and `--tee` put something before each line: over MPI with a blank behind it.
_LABEL = rb"(?:\[\d+,?\d*\]<stderr>: ?|\[rank \d+ [\d:]+\] )?"
# A progress bar may stand before it, whose line has not ended.
_EVENT = re.compile(_LABEL + re.escape(LINE_PREFIX.encode()) + rb"(\{.*)$")


class Filter(Protocol):
    """What a launcher's standard error passes through."""

    def feed(self, piece: bytes) -> bytes:
        """Returns what is shown of the next output."""

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""


class Muted:
    """A filter that drops all until it is unmuted.

    Args:
        rest: `Filter`, through which all passes from then on.
    """

    def __init__(self, rest: Filter) -> None:
        self._rest = rest
        self._is_muted = True

    def unmute(self) -> None:
        """Drops nothing from now on."""
        self._is_muted = False

    def feed(self, piece: bytes) -> bytes:
        """Returns what is shown of the next output."""
        return b"" if self._is_muted else self._rest.feed(piece)

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""
        return b"" if self._is_muted else self._rest.finish()


def _start_of_event(beginning: bytes) -> int:
    """Returns from where on the beginning of a line may be an event; its length if it is none."""
    prefix = LINE_PREFIX.encode()
    if found := re.search(_LABEL + re.escape(prefix), beginning):
        return found.start()
    # A progress bar may begin with a bracket too.
    is_short = len(beginning) < len(prefix) + _MAX_BEFORE and b"\r" not in beginning
    if beginning.startswith(b"[") and is_short:
        return 0
    ends = (len(beginning) - count for count in range(len(prefix) - 1, 0, -1) if beginning.endswith(prefix[:count]))
    return next(ends, len(beginning))


class EventLines:
    """A filter of a launcher's standard error that takes events out of it.

    Args:
        rest: `Filter` or `None`, through which all else passes.

    Attributes:
        lines: list of str, the events so far.
    """

    def __init__(self, rest: Filter | None = None) -> None:
        self.lines: list[str] = []
        self._rest = rest
        self._held = b""  # the beginning of a line that may be an event
        self._end = b""

    def feed(self, piece: bytes) -> bytes:
        """Returns what is shown of the next output; a line that has not ended is held only if it may be an event.

        Args:
            piece: bytes.
        """
        *lines, last = (self._held + piece).split(b"\n")
        shown = b""
        for line in lines:
            found = _EVENT.search(line)
            if found:
                self.lines.append(found[1].decode(errors="replace"))
            if not found or found.start():
                shown += (line[: found.start()] if found else line) + b"\n"
        start = _start_of_event(last)
        self._held = last[start:]
        shown += last[:start]
        self._end = (self._end + shown)[-_KEPT_BYTES:]
        return shown if self._rest is None else self._rest.feed(shown)

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""
        held, self._held = self._held, b""
        return held if self._rest is None else self._rest.feed(held) + self._rest.finish()

    def end(self) -> str:
        """Returns the end of what the launcher has said."""
        return self._end.decode(errors="replace")
