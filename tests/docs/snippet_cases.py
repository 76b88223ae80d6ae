"""Each page's snippets, run by every rank as one script: what a reader has who copies them one after the other."""

import functools
import os
import random
import tempfile
from pathlib import Path

import numpy as np

from tests.docs.guide import fences, scripts


def run(path: Path) -> None:
    import keras

    keras.backend.clear_session()
    # A script begins with a random state of its own on each rank; the last case's scope has left that of the chief.
    random.seed()
    np.random.seed()
    folder = Path(tempfile.gettempdir(), path.stem)  # the same for all ranks
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for line, code in fences(path.read_text(), "python", "before"):
        exec(compile("\n" * line + code, str(path), "exec"), names)


CASES = {name: functools.partial(run, path) for name, path in scripts().items()}
