"""Seeds of pipelines that a script makes or iterates by itself."""

from __future__ import annotations

import collections
import zlib

from kdist.data.pipelines.determinism import derived_seed


class PipelineSeeds:
    """Seeds that follow from what is shuffled, and from how many pipelines like it there were before.

    No message is sent. Ranks get the same seeds if each of them asks as often for pipelines of a kind, whatever it does
    with others meanwhile.

    Args:
        seed: int, equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_made = collections.Counter[str]()

    def next(self, parts: str) -> int:
        """Returns the seed of the next pipeline.

        Args:
            parts: str, what `nondeterministic_parts` describes of it.
        """
        self._num_made[parts] += 1
        return derived_seed(self._seed, zlib.crc32(f"{parts} {self._num_made[parts]}".encode()))
