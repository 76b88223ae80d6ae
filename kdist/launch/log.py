"""kdist's log on the screen: who shows it, from which level on, and what it says only once."""

from __future__ import annotations

import logging
import os

from kdist.cluster.info import ClusterInfo

_LOG = logging.getLogger("kdist")

LEVELS = ("debug", "info", "warning", "error")
"""What `KDIST_LOG` may be."""

TRACEBACK_VARIABLE = "KDIST_TRACEBACK"
"""The variable that, as `full`, leaves kdist's frames in tracebacks."""


def show_log(info: ClusterInfo) -> None:
    """Adds a handler for kdist's log unless the user has one: all messages on the chief, warnings elsewhere.

    `KDIST_LOG` sets the level, else a level that the user has set for the logger stays.
    """
    if _LOG.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("[kdist] %(message)s" if info.is_chief else f"[kdist rank {info.rank}] %(message)s")
    )
    handler.setLevel(logging.NOTSET if info.is_chief else logging.WARNING)
    _LOG.addHandler(handler)
    _LOG.propagate = False
    level = os.environ.get("KDIST_LOG", "").lower()
    if level in LEVELS:
        _LOG.setLevel(level.upper())
        return
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.INFO)
    if level:
        _LOG.warning("KDIST_LOG is unknown. Received: %r. Expected one of %s.", level, ", ".join(LEVELS))


class OnceLog:
    """Logs each text once in this process: scopes and models that come again have nothing new to say."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def info(self, text: str) -> None:
        """Logs a text, unless it has been logged.

        Args:
            text: str.
        """
        if text not in self._said:
            self._said.add(text)
            _LOG.info("%s", text)

    def clear(self) -> None:
        """Forgets what has been logged."""
        self._said.clear()


once = OnceLog()
"""That of this process."""
