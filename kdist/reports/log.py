"""kdist's log on the screen: who shows it, from which level on, and what it says only once."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping

from kdist._user_code import is_kdists, user_place
from kdist.cluster.info import ClusterInfo

_LOG = logging.getLogger("kdist")

LEVELS = ("debug", "info", "warning", "error")
"""What `KDIST_LOG` may be."""

TRACEBACK_VARIABLE = "KDIST_TRACEBACK"
"""The variable that, as `full`, leaves kdist's frames in tracebacks."""


def show_log(info: ClusterInfo) -> None:
    """Adds a handler for kdist's log unless the user has one: all messages on the chief, warnings elsewhere.

    `KDIST_LOG` sets the level, for the user's handlers, too; else one that the user has set for the logger stays.
    """
    level = os.environ.get("KDIST_LOG", "").lower()
    if level in LEVELS:
        _LOG.setLevel(level.upper())
    if _LOG.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    shows_all = info.rank == 0  # an evaluator, too
    handler.setFormatter(
        logging.Formatter("[kdist] %(message)s" if shows_all else f"[kdist rank {info.rank}] %(message)s")
    )
    handler.setLevel(logging.NOTSET if shows_all else logging.WARNING)
    _LOG.addHandler(handler)
    _LOG.propagate = False
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.INFO)
    if problem := problem_of_level(os.environ):
        _LOG.warning("%s", problem)


def problem_of_level(env: Mapping[str, str]) -> str:
    """Returns what is wrong with `KDIST_LOG`, or an empty text.

    Args:
        env: mapping, the environment.
    """
    level = env.get("KDIST_LOG", "")
    if level.lower() in ("", *LEVELS):
        return ""
    return (
        f"KDIST_LOG is unknown. Received: KDIST_LOG={level!r}. Expected one of {', '.join(LEVELS)}. Fix: set one of "
        "these, or unset it."
    )


@contextlib.contextmanager
def warnings_at_users_lines() -> Iterator[None]:
    """A context in which a Python warning that would show a line of kdist shows the user's line that led there.

    Keras and TensorFlow warn of their caller, and that is kdist where it calls them for the user.
    """
    previous = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        place = user_place() if is_kdists(filename) else None
        if place is not None:
            (filename, lineno), line = place, None
        return previous(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        if warnings.formatwarning is formatted:  # the user may have set another one
            warnings.formatwarning = previous


class OnceLog:
    """Logs each text once in this process: scopes and models that come again have nothing new to say."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def debug(self, text: str) -> None:
        """Logs a detail, unless it has been logged.

        Args:
            text: str.
        """
        self._log(logging.DEBUG, text)

    def info(self, text: str, key: str = "") -> None:
        """Logs a text, unless it has been logged.

        Args:
            text: str.
            key: str, as that of `warning`.
        """
        self._log(logging.INFO, text, key)

    def warning(self, text: str, key: str = "") -> None:
        """Warns by a text, unless it has been logged.

        Args:
            text: str.
            key: str, what says whether it has been logged, for texts with numbers; the text by default.
        """
        self._log(logging.WARNING, text, key)

    def clear(self) -> None:
        """Forgets what has been logged."""
        self._said.clear()

    def _log(self, level: int, text: str, key: str = "") -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            _LOG.log(level, "%s", text)


once = OnceLog()
"""That of this process."""
