"""What kdist says in its log while a test looks, in whichever process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from kdist.reports.log import once


@contextlib.contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """Gives the list of the messages that this process logs while the context is open, from some level on."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kdist")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logging.INFO))
    once.clear()  # an earlier case may have said the same
    try:
        yield said
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
