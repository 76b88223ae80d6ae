"""What `kdist run` itself says to the user."""

from __future__ import annotations

import os
import sys

from kdist.reports.output import BEGINS_LINE, SAID


def tell(text: str, *, after_output: bool = False) -> None:
    """Prints a message. A terminal or a pipe that is closed does not change the command's exit code.

    Args:
        text: str, the message.
        after_output: bool, whether ranks may have left a line without an end, such as a progress bar.
    """
    try:
        print(f"{BEGINS_LINE if after_output else ''}{SAID}{text}", file=sys.stderr, flush=True)
    except OSError:
        # Python would write the rest when it exits, and exit with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
