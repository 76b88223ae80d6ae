"""The versions of files and directories that all ranks write: equal for the same write on each rank."""

from __future__ import annotations

import collections
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdist.engines.engine import Engine

MODULUS = 10**9


class Versions:
    """Numbers what the ranks of a job write, without messages when they write.

    Collective: every rank must make one, in the same order: ranks agree on a number of the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._job: int = engine.broadcast_object(time.time_ns())
        self._writes: collections.Counter[Path] = collections.Counter()

    def next(self, path: Path, variables: Sequence[Any]) -> int:
        """Returns the version of this rank's next write to a path, below `MODULUS`.

        It is another rank's if that writes to the path for as many times, and variables of the same values.
        """
        path = path.resolve()
        self._writes[path] += 1
        version = zlib.crc32(f"{self._job} {self._writes[path]}".encode())
        for variable in variables:
            version = zlib.crc32(np.asarray(variable).tobytes(), version)
        return version % MODULUS
