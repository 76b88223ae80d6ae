"""The cores on which a process may run, and the memory that is near them, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

NUMA = Path("/sys/devices/system/node")
"""Where Linux lists the NUMA nodes."""


def in_words(mine: Collection[int], total: int, nodes: Mapping[int, str]) -> str:
    """Returns in words on which cores of the host, and near which memory, this process may run.

    Args:
        mine: collection of int, the numbers of its cores.
        total: int, how many the host has.
        nodes: mapping of each NUMA node's number to its cores, as `numa_nodes` returns it.

    Example:
    >>> in_words({0, 1, 2, 3}, 8, {0: "0-1,4-5", 1: "2-3,6-7"})
    '4 of 8 (0-3; NUMA nodes 0, 1 of 2), those that this process may use'
    """
    near = [str(node) for node, text in nodes.items() if _numbers(text) & set(mine)]
    numa = f"; NUMA node{'s' * (len(near) > 1)} {', '.join(near)} of {len(nodes)}" if near else ""
    return f"{len(mine)} of {total} ({_ranges(mine)}{numa}), those that this process may use"


def numa_nodes(directory: Path) -> dict[int, str]:
    """Returns the cores of each NUMA node, as the kernel writes them; nothing where it does not say."""
    found = {}
    for path in directory.glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name.removeprefix("node"))] = path.read_text().strip()
    return dict(sorted(found.items()))


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list of ranges.

    Example:
    >>> sorted(_numbers("0-2,5"))
    [0, 1, 2, 5]
    """
    bounds = [part.split("-") for part in text.split(",") if part]
    return {number for each in bounds for number in range(int(each[0]), int(each[-1]) + 1)}


def _ranges(those: Collection[int]) -> str:
    """Returns numbers as a list of ranges.

    Example:
    >>> _ranges({5, 0, 1, 2})
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(those):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
