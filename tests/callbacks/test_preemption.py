"""A job that is told to go ends with the code that its scheduler waits for; test_backup_and_restore.py has the rest."""

from tests.callbacks.interruptions import preempt_training
from tests.helpers.jobs import job


def test_the_jobs_exit_code(tmp_path):
    preempt_training(tmp_path / "backup", job("mpi", 2))
