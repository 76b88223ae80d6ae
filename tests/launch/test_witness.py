"""Under MPICH's mpirun, which ends the other ranks before they could say which one has died."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.cells import Cell
from tests.helpers import needs, spmd

pytestmark = needs.mpich

DIED = "without a word"
LIMIT = 60

SCRIPT = """
import os, sys, time, kdist
rank = kdist.cluster_info().rank
open(f"{sys.argv[2]}/{rank}", "w").close()
time.sleep(1)
if rank == 2 or sys.argv[1] == "all":
    exec(sys.argv[1].replace("all", "pass"))
time.sleep(0 if sys.argv[1] == "all" else 30)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    python = os.environ["KDIST_TEST_MPICH_PYTHON"]
    return [python, "-m", "kdist.cli.main", "run", "-np", "3", str(tmp_path / "script.py")]


LEAVES_A_CHILD = "if os.fork(): os._exit(4)"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(4)", 4),
        (LEAVES_A_CHILD, 4),
        ("os.kill(os.getpid(), 9)", 128 + 9),
        ("os.abort()", 128 + 6),
        ("sys.exit(6)", 6),
    ],
)
def test_the_first_rank_to_die_is_named_and_no_other(command, tmp_path, end, code):
    """Before kdist is used for anything, too: nobody watches over the ranks then."""
    ended = spmd.execute([*command, end, str(tmp_path)], timeout=LIMIT)
    assert not ended.timed_out, ended.output
    # Of a signal Hydra may have heard first: the code is the launcher's own then, as docs/failure.md says, which is
    # all bits of the signals that ended a rank, the SIGTERM that it sends the others too.
    number = max(0, code - 128)
    assert ended.returncode == code or number and ended.returncode & number == number, ended.output
    assert ended.output.count("[kdist] rank 2 of 3") == 1, ended.output
    assert ended.output.count("[kdist] rank") == 1, ended.output
    assert (DIED in ended.output) == (end != "sys.exit(6)"), ended.output


def test_a_rank_that_leaves_a_training_with_0_is_not_a_good_end():
    """Hydra may kill the others then, and call that a good end."""
    cell = Cell("mpich", "os._exit 0", "epoch", 1)
    cell.check(cell.run())


def test_where_the_kernel_does_not_tell_who_ends_the_job_is_as_without(command, tmp_path):
    """Nothing that Hydra waits for is kept."""
    old = "import os, sys; del os.pidfd_open; from kdist.cli.main import main; sys.exit(main(sys.argv[1:]))"
    python, *_ = command
    line = [python, "-c", old, *command[command.index("run") :]]
    ended = spmd.execute([*line, "all", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.output, ended.timed_out) == (0, "", False)


def test_a_stderr_that_nobody_reads_does_not_keep_the_job(command, tmp_path):
    unread = "import os, sys; r, w = os.pipe(); os.dup2(w, 2); os.closerange(3, 9); os.execv(sys.argv[1], sys.argv[1:])"
    closed = [sys.executable, "-c", unread]
    ended = spmd.execute([*closed, *command, "os._exit(4)", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.timed_out) == (4, False), ended.output


def test_nothing_is_said_when_all_is_well(command, tmp_path):
    ended = spmd.execute([*command, "all", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.output) == (0, "")


@pytest.mark.timeout(LIMIT)
def test_ranks_that_are_ended_by_ctrl_c_are_not_said_to_have_died(command, tmp_path):
    job = subprocess.Popen(
        [*command, "pass", str(tmp_path)],
        cwd=spmd.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which `pytest &` ignores
    )
    while len(list(tmp_path.glob("[012]"))) < 3:
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    said, _ = job.communicate()
    assert job.returncode == 130
    assert DIED not in said
