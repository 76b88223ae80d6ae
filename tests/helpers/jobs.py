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
        self,
        target: str,
        *,
        only: Sequence[str],
        timeout: float,
        given: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> spmd.Result:
        """Runs some of a target's cases on every rank; see `spmd.run`."""
        return spmd.run(
            target,
            self.ranks,
            given=given,
            only=only,
            launcher=self.launcher,
            python=self.python,
            env={"KDIST_STRATEGY": self.strategy, **(env or {})},
            timeout=timeout,
        )

    def launch(self, arguments: Sequence[str], *, timeout: float) -> spmd.Finished:
        """Runs Python with some arguments on every rank; see `spmd.launch`."""
        command, env = [self.python, *arguments], {"KDIST_STRATEGY": self.strategy}
        return spmd.launch(command, self.ranks, launcher=self.launcher, python=self.python, env=env, timeout=timeout)


ENGINES = {
    "mpi": ("mpirun", "mpi"),
    "mpich": ("kdist_run_hydra", "mpi"),
    "horovod over gloo": ("horovodrun_gloo", "auto"),
    "horovod over mpi": ("mpirun", "horovod"),
    "collective": ("local_cluster", "auto"),
}
"""What a job is called, the launcher, and the strategy that is asked for."""

MORE = {
    "intel mpi": ("kdist_run_hydra", "mpi"),
    "slurm": ("srun", "auto"),
    "slurm pmix": ("srun_pmix", "auto"),
    "slurm pmi2": ("srun_pmi2", "auto"),
}
"""The same for jobs that need what few machines have. Those of Slurm run within `python -m tests.helpers.slurm`."""

# Each MPI has an environment of its own, for all of them install `bin/mpirun`; see `tests/run`.
_PYTHONS = {
    "mpich": "KDIST_TEST_MPICH_PYTHON",
    "intel mpi": "KDIST_TEST_INTEL_MPI_PYTHON",
    "slurm pmi2": "KDIST_TEST_INTEL_MPI_PYTHON",
}


def job(engine: str, ranks: int) -> Job:
    """Returns the job of some ranks that talk by one of `ENGINES` or `MORE`."""
    launcher, strategy = {**ENGINES, **MORE}[engine]
    python = os.environ[_PYTHONS[engine]] if engine in _PYTHONS else sys.executable
    return Job(launcher, ranks, strategy, python)
