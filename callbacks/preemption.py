"""Save and exit after a signal of the scheduler."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kdist.checkpoint.preempt import Preempt
from kdist.errors import StrategyError


class Preemption(Preempt):
    """Saves and exits when a scheduler preempts the job.

    After a signal to any rank, all ranks finish the same step (the request is sent in a step's own message), save by
    `kdist.callbacks.BackupAndRestore`, or else by `keras.callbacks.ModelCheckpoint`, and raise `SystemExit`. After the
    last step of an epoch, the epoch and its validation end first. A second signal, a second later or more, has its
    usual effect.

    `kdist run --restarts 3 --max-np M` asks for the same when it can start a larger job.

    The exit code makes the scheduler restart the job: 75 is `EX_TEMPFAIL` of BSD's `sysexits.h` (Slurm:
    `RequeueExit=75` in slurm.conf, or `scontrol requeue $SLURM_JOB_ID` in the batch script; LSF:
    `REQUEUE_EXIT_VALUES`). Open MPI's mpirun forwards SIGUSR1 to the ranks; after a SIGTERM to itself it ends them
    within seconds. So have the scheduler send SIGUSR1 (Slurm: `--signal=USR1@120`), or the signal to the ranks.

    Args:
        exit_code: int from 1 to 255, the exit code of the process.
        signals: sequence of str, the names of the handled signals.

    Raises:
        StrategyError: if an argument is invalid.
        ScopeError: when training begins, if there is no callback that saves.

    Example:
    ```python
    callbacks = [kdist.callbacks.BackupAndRestore("backup", save_freq=500), kdist.callbacks.Preemption()]
    ```
    """

    def __init__(self, exit_code: int = 75, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        is_code = isinstance(exit_code, int) and 0 < exit_code < 256
        are_named = not isinstance(signals, str) and set(signals) <= set(signal.Signals.__members__)
        if not (is_code and are_named):
            raise StrategyError(
                f"An argument of Preemption is invalid. Received: exit_code={exit_code!r}, signals={signals!r}. "
                "Expected a number from 1 to 255, as 0 says that the training has ended, and names as "
                '("SIGTERM", "SIGUSR1"). Fix: change it.'
            )
        super().__init__(exit_code, signals)
