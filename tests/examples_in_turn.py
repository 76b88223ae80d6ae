"""Runs examples one after the other in one job, each in a directory of its own: a launch costs more than an example.

kdist run -np 2 tests/examples_in_turn.py DIRECTORY '[["digits.py", "--epochs", "3"], ...]'
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import keras

import kdist

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(directory: Path, command: list[str]) -> None:
    """Runs an example as `__main__`, in the state in which a new process would find Keras."""
    name, *arguments = command
    place = directory / name
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    sys.argv = [str(EXAMPLES / name), *arguments]
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    if kdist.is_chief():
        print(f"=== {name} ===", flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))  # as for a script that Python is given
    directory, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
    for each in commands:
        run(directory, each)
