"""What a forked child must not keep of its parent: connections by whose end other ranks notice the parent's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_in_forked_children(close: Callable[[], None]) -> None:
    """Calls a method in each child that this process forks, as `multiprocessing` does, while its object lives.

    Args:
        close: bound method that is called without arguments.
    """
    method = weakref.WeakMethod(close)

    def run() -> None:
        if (found := method()) is not None:
            found()

    os.register_at_fork(after_in_child=run)
