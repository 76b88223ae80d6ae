"""Which process is a rank: what a rank has started has inherited the launcher's variables, and is none."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from kdist.cluster.info import ClusterInfo
from kdist.errors import ClusterError

_VARIABLE = "_KDIST_RANK"  # in the environment, which only processes that are started from now on inherit


def take_rank(info: ClusterInfo, env: MutableMapping[str, str]) -> None:
    """Takes this process for the rank of its variables, if there are several, and lets those that it starts know.

    A process that starts the script and opens no scope, as a wrapper, leaves the rank to the script.

    Args:
        info: `ClusterInfo`.
        env: mapping of variable name to value, as `os.environ`.

    Raises:
        ClusterError: if a process that started this one, or forked it, is that rank.
    """
    if info.size == 1:
        return
    rank = f"{info.launcher} {info.rank} {info.size}"
    taken, _, process = env.get(_VARIABLE, "").rpartition(" ")
    if taken == rank and process != str(os.getpid()):
        fix = (
            "start it with KDIST_STRATEGY=single in its environment, as subprocess.run([...], env={**os.environ, "
            f'"KDIST_STRATEGY": "single"}}), or without the launcher\'s variables and {_VARIABLE}.'
        )
        # A process of a pool imports the script that has started it.
        if any(word == "--multiprocessing-fork" or "from multiprocessing." in word for word in sys.orig_argv):
            fix = 'put what opens the scope under `if __name__ == "__main__":`, as for every such pool of processes.'
        raise ClusterError(
            "This process has the variables of a rank, and was started by that rank. Received: those of rank "
            f"{info.rank} of {info.size} ({info.launcher}), which process {process} is; this is process {os.getpid()}. "
            f"Expected one process a rank: the others wait for no second one. Fix: {fix}"
        )
    env[_VARIABLE] = f"{rank} {os.getpid()}"


def forget_rank(env: MutableMapping[str, str]) -> None:
    """Takes back what `take_rank` has said to processes that are started from now on."""
    env.pop(_VARIABLE, None)
