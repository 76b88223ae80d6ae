"""On the path of what the tests start: Python runs it first, and does not find the packages that it names.

TensorFlow and Keras import these if they are there, which few tests need: half of what starting a rank costs, and
starting ranks is most of what a run of the tests costs. `KDIST_TEST_HIDDEN` hides others, with commas between them.

What is printed is written by whole lines, as `kdist run` has it: ranks share a pipe, and Python without buffers writes
each argument of `print` by itself.
"""

import contextlib
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = os.environ.get("KDIST_TEST_HIDDEN", "IPython,jax,matplotlib,pandas,scipy,sklearn").split(",")


class Finder(PathFinder):
    """Finds as Python does, but for what is hidden."""

    @classmethod
    def find_spec(cls, fullname: str, *where: Any) -> ModuleSpec | None:
        """Returns where a module is, or `None`."""
        return None if fullname in HIDDEN else super().find_spec(fullname, *where)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
gc.set_threshold(100_000, 50, 100)  # imports and tracing make much that stays: to look through it again costs a lot
for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(AttributeError):  # there may be none
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
