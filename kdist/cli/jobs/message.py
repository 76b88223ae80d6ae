"""What `kdist run` itself says to the user."""

from __future__ import annotations

import os
import sys


def tell(text: str) -> None:
    """Prints a message. A terminal or a pipe that is closed does not change the command's exit code.

    Args:
        text: str, the message.
    """
    try:
        print(f"kdist: {text}", file=sys.stderr, flush=True)
    except OSError:
        # Python would write the rest when it exits, and exit with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
