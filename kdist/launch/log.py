"""kdist's log on the screen."""

from __future__ import annotations

import logging

from kdist.cluster.info import ClusterInfo

_LOG = logging.getLogger("kdist")


def show_log(info: ClusterInfo) -> None:
    """Adds a handler for kdist's log unless the user has one: all messages on the chief, warnings elsewhere."""
    if _LOG.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("[kdist] %(message)s" if info.is_chief else f"[kdist rank {info.rank}] %(message)s")
    )
    handler.setLevel(logging.INFO if info.is_chief else logging.WARNING)
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
