"""Saves checkpoints without end, to be killed: `python -m tests.callbacks.saver FOLDER`."""

from __future__ import annotations

import sys

import numpy as np

from kdist.checkpoint.storage.files import CheckpointDirectory

LENGTH = 200_000


def main(path: str) -> None:
    """Goes on from what is there, and says each number that is saved."""
    folder = CheckpointDirectory(path)
    found = folder.read()
    number = found[1]["part"]["number"] if found else 0
    while True:
        number += 1
        folder.write({"part": {"number": number, "values": np.full(LENGTH, number, np.int64)}})
        print(f"{number}\n", end="", flush=True)  # in one write: it may be killed between two


if __name__ == "__main__":
    main(sys.argv[1])
