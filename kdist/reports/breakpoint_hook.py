"""`breakpoint()` in one of several ranks: it is skipped with a hint, because they share one terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from kdist._user_code import user_line
from kdist.cluster.info import ClusterInfo
from kdist.reports.log import once, show_log


def install(info: ClusterInfo, env: Mapping[str, str]) -> None:
    """Lets `breakpoint()` go on with a hint among several ranks, unless the user has chosen a debugger.

    Args:
        info: `ClusterInfo`.
        env: mapping, the environment.
    """
    if info.size > 1 and sys.breakpointhook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in env:
        sys.breakpointhook = functools.partial(_skip, info)


def _skip(info: ClusterInfo, *args: Any, **kwargs: Any) -> None:
    """Says that there is no debugger here, once a line: a prompt would read the input that the ranks share."""
    if info.rank == 0:
        show_log(info)
        once.warning(
            f"breakpoint() in {user_line()} is skipped: {info.size} ranks share one terminal. Fix: kdist run -np 1 "
            "stops there; PYTHONBREAKPOINT=remote_pdb.set_trace, or another remote debugger, stops each rank."
        )
