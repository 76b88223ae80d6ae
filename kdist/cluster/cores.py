"""The cores on which ranks run, and a remark on ranks that have fewer cores than they are."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_RANKS_A_CORE = 4  # so many are started without a question, to try what happens on many


def own_cores() -> list[Any]:
    """Returns the host's name, the cores of this process, for how many it has time, and how many the host has."""
    own = ""
    with contextlib.suppress(OSError):
        own = _OWN_CGROUPS.read_text()
    total = os.cpu_count() or 1
    limit = min(total, limit_of_cgroups(own, _CGROUPS))
    return [os.uname().nodename, sorted(os.sched_getaffinity(0)), limit, total]


def limit_of_cgroups(own: str, root: Path) -> float:
    """Returns how many cores' time the cgroups of a process have, as those of containers; infinite without a limit.

    Args:
        own: str, its cgroups, as `/proc/self/cgroup` lists them.
        root: `Path`, where all cgroups are.
    """
    limits = [math.inf]
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root  # in version 1 each controller has a tree
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                if controllers:
                    texts = [(folder / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period")]
                else:
                    texts = (folder / "cpu.max").read_text().split()
                quota, period = map(int, texts)
                limits += [math.ceil(quota / period)] if quota > 0 else []  # -1 is no limit
    return min(limits)


def remark_on_start(ranks: int, own: Sequence[Any]) -> str:
    """Returns what to know before far more ranks are started on this host than it has cores; empty if they are not.

    Args:
        ranks: int, how many will be started.
        own: sequence, what `own_cores` returned.
    """
    _, mine, limit, _ = own
    cores = min(len(mine), limit)
    if ranks <= _RANKS_A_CORE * cores:
        return ""
    return (
        f"{ranks} ranks on {cores} core(s): they train no faster than {cores} would, and each takes 0.5 GB of memory "
        f"or more. Fix: -np {cores}, or more hosts"
    )


def remark_on_cores(of_ranks: Sequence[Sequence[Any]], local_size: int) -> str:
    """Returns what makes ranks slow that have fewer cores than they are, and a fix; empty if none have.

    Args:
        of_ranks: sequence of what `own_cores` returned on each rank.
        local_size: int, the ranks of a host: two hosts may have the same name.
    """
    for host in dict.fromkeys(name for name, *_ in of_ranks):
        masks = [frozenset(cores) for name, cores, *_ in of_ranks if name == host]
        limit, total = next((limit, total) for name, _, limit, total in of_ranks if name == host)
        for shared in dict.fromkeys((frozenset().union(*masks), *masks)):
            ranks = min(local_size, sum(mask <= shared for mask in masks))
            cores = min(len(shared), limit)
            if ranks > cores:
                more = "more hosts"
                if cores < total:
                    more = f"more of its {total} cores (`taskset`, `mpirun --bind-to`, limits of a container or a job)"
                return (
                    f"{ranks} ranks share {cores} core(s) of host {host}: they train no faster than {cores} would. "
                    f"Fix: -np {cores}, or {more}"
                )
    return ""


def remark_on_threads(of_ranks: Sequence[int]) -> str:
    """Returns a warning of ranks that compute with other numbers of threads than others; empty if none do.

    Args:
        of_ranks: sequence of ints, what `own_threads` returned on each rank.
    """
    if len(set(of_ranks)) == 1 or 0 in of_ranks:  # GPUs compute on some
        return ""
    by_number = {
        number: [rank for rank, own in enumerate(of_ranks) if own == number] for number in sorted(set(of_ranks))
    }
    numbers = "; ".join(f"{number} on rank(s) {ranks}" for number, ranks in by_number.items())
    return (
        "ranks compute with different numbers of threads: TensorFlow adds up a gradient's norm in as many pieces as it "
        f"has threads, and weights would differ between the ranks in their last bits. Received: {numbers}. Expected "
        f"one number. Fix: TF_NUM_INTRAOP_THREADS={min(of_ranks)} in the environment of all ranks."
    )
