"""A job that is told to go saves first."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.training.preempt import Preempt


class Preemption(Preempt):
    """Saves and leaves when a scheduler wants the machine back.

    When a signal reaches any rank, all ranks finish the step that they agree on (the request rides in a step's own
    message), save through `kdist.callbacks.BackupAndRestore`, or else through `keras.callbacks.ModelCheckpoint`, and
    raise `SystemExit`. In the last step of an epoch, and between epochs, what belongs to the epoch comes first. A
    second signal acts as if this callback were not there.

    The exit code is for the scheduler, which starts the job again by it: 75 is `EX_TEMPFAIL` of BSD's `sysexits.h`
    (Slurm: `RequeueExit=75` in slurm.conf, or `scontrol requeue $SLURM_JOB_ID` in the batch script; LSF:
    `REQUEUE_EXIT_VALUES`). Open MPI's mpirun passes SIGUSR1 on to the ranks; at a SIGTERM of its own it ends them
    within seconds, so have the scheduler send SIGUSR1 (Slurm: `--signal=USR1@120`), or the signal to the ranks.

    Args:
        exit_code: int, what the process ends with.
        signals: sequence of str, the names of the signals that are heeded.

    Raises:
        ScopeError: when training begins, if there is no callback that could save.

    Example:
    ```python
    callbacks = [kdist.callbacks.BackupAndRestore("backup", save_freq=500), kdist.callbacks.Preemption()]
    ```
    """

    def __init__(self, exit_code: int = 75, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        super().__init__(exit_code, signals)
