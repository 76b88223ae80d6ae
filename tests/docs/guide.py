"""The guide as the tests read it: its pages, and what is in their fences.

What stands in a `python` fence is run, in order, page by page; in a `py` fence it is shown only: other
systems' scripts, or lines that break something on purpose. A comment `<!-- before ... -->` holds lines that run
first and are not shown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import spmd

FOLDER = spmd.ROOT / "docs"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md"))}

_FENCE = re.compile(r"^(?: *```(?P<kind>\w*)|<!-- before)\n(?P<body>.*?)^(?: *```|-->)$", re.MULTILINE | re.DOTALL)


def fences(text: str, *kinds: str) -> Iterator[tuple[int, str]]:
    """Yields the line, from 0, and the text of each fence of some kinds; that of hidden lines is `"before"`."""
    for found in _FENCE.finditer(text):
        kind = "before" if found["kind"] is None else found["kind"]
        if kind in kinds:
            yield text.count("\n", 0, found.start("body")), textwrap.dedent(found["body"])  # that of a list is indented


def scripts() -> dict[str, Path]:
    """Returns the pages that have something to run."""
    return {name: path for name, path in PAGES.items() if any(fences(path.read_text(), "python"))}
