"""The jobs that suites for any engine run on: how the ranks talk, what starts them, and how many they are."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

from tests.helpers import spmd


@dataclasses.dataclass(frozen=True)
class Job:
    """A number of ranks under a launcher.

    Attributes:
        launcher: str, a key of `spmd.LAUNCHERS`, or `"mpirun"`.
        ranks: int, how many.
        strategy: str, what `KDIST_STRATEGY` says.
        python: str, the interpreter of the environment that the ranks run in.
    """

    launcher: str
    ranks: int
    strategy: str = "auto"
    python: str = sys.executable

    def run(
        self, target: str, *, only: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
    ) -> spmd.Result:
        """Runs some of a target's cases on every rank; see `spmd.run`."""
        env = {"KDIST_STRATEGY": self.strategy, **(env or {})}
        return spmd.run(
            target, self.ranks, only=only, launcher=self.launcher, python=self.python, env=env, timeout=timeout
        )

    def launch(self, arguments: Sequence[str], *, timeout: float) -> spmd.Finished:
        """Runs Python with some arguments on every rank; see `spmd.launch`."""
        command, env = [self.python, *arguments], {"KDIST_STRATEGY": self.strategy}
        return spmd.launch(command, self.ranks, launcher=self.launcher, python=self.python, env=env, timeout=timeout)


ENGINES = {
    "mpi": ("mpirun", "mpi"),
    "mpich": ("kdist_run_mpich", "mpi"),
    "horovod over gloo": ("horovodrun_gloo", "auto"),
    "horovod over mpi": ("mpirun", "horovod"),
    "collective": ("local_cluster", "auto"),
}
"""What a job is called, the launcher, and the strategy that is asked for."""


def job(engine: str, ranks: int) -> Job:
    """Returns the job of some ranks that talk by one of `ENGINES`."""
    launcher, strategy = ENGINES[engine]
    # MPICH has an environment of its own, for both MPIs install `bin/mpirun`; see `tests/run`.
    python = os.environ["KDIST_TEST_MPICH_PYTHON"] if engine == "mpich" else sys.executable
    return Job(launcher, ranks, strategy, python)
