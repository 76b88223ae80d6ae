"""The numbers of a comparison, as throughputs and as ratios of them within a turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contenders import CONTENDERS


class Throughputs:
    """What `compare.py` measured, in samples/s.

    Args:
        record: dict, what stands in `compare.json`.
        way: str, a field of `FitTimes`: by which of the times.
    """

    def __init__(self, record: dict[str, Any], way: str = "steady") -> None:
        self._by_turn: dict[tuple[str, str], dict[int, float]] = {}
        for run in record["runs"]:
            value = run["batch"] * run["ranks"] / run["seconds a step"][way]
            self._by_turn.setdefault((run["contender"], run["model"]), {})[run["turn"]] = value
        self.contenders = [name for name in CONTENDERS if any(name == each for each, _ in self._by_turn)]

    def of(self, name: str, model: str) -> list[float]:
        """Returns a contender's throughputs, one a turn."""
        return list(self._by_turn.get((name, model), {}).values())

    def ratios(self, name: str, other: str, model: str) -> list[float]:
        """Returns a contender's throughput relative to another's, one ratio for each turn that has both."""
        mine, theirs = (self._by_turn.get((each, model), {}) for each in (name, other))
        return [mine[turn] / theirs[turn] for turn in sorted(mine.keys() & theirs.keys())]

    def efficiencies(self, name: str, model: str) -> list[float]:
        """Returns a contender's scaling efficiencies: 1 is the plain training of its framework on each core."""
        contender = CONTENDERS[name]
        return [ratio / contender.ranks for ratio in self.ratios(name, contender.base, model)]

    def relative_efficiencies(self, name: str, other: str, model: str) -> list[float]:
        """Returns a contender's efficiency relative to another's, one ratio for each turn that has both."""
        bases = CONTENDERS[name].base, CONTENDERS[other].base
        mine, theirs, my_base, their_base = (self._by_turn.get((each, model), {}) for each in (name, other, *bases))
        turns = sorted(mine.keys() & theirs.keys() & my_base.keys() & their_base.keys())
        return [mine[turn] / my_base[turn] / (theirs[turn] / their_base[turn]) for turn in turns]

    def best(self, names: Sequence[str], model: str) -> str:
        """Returns the contender of the highest median efficiency; `""` if none has any."""
        measured = [name for name in names if self.efficiencies(name, model)]
        return max(measured, key=lambda name: statistics.median(self.efficiencies(name, model)), default="")
