"""Each page's snippets, run by every rank as one script: what a reader has who copies them one after the other."""

import functools
import os
import tempfile
from pathlib import Path

from tests.docs.guide import fences, scripts


def run(path: Path) -> None:
    import keras

    keras.backend.clear_session()
    folder = Path(tempfile.gettempdir(), path.stem)  # the same for all ranks
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for line, code in fences(path.read_text(), "python", "before"):
        exec(compile("\n" * line + code, str(path), "exec"), names)


CASES = {name: functools.partial(run, path) for name, path in scripts().items()}
