"""The first rank to die is reported under MPICH's mpirun, which kills the ranks that could report it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.cells import Cell
from tests.helpers import needs, spmd

pytestmark = needs.mpich

DIED = "kdist: rank 2 on host"
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
    """Also before kdist is used, when there are no heartbeats."""
    ended = spmd.execute([*command, end, str(tmp_path)], timeout=LIMIT)
    assert not ended.timed_out, ended.output
    # Hydra may see a signal first. The code is then its own (docs/failure.md): the bits of all signals that killed a
    # rank, with the SIGTERM that it sends to the others.
    number = max(0, code - 128)
    assert ended.returncode == code or number and ended.returncode & number == number, ended.output
    reports_itself = end == "sys.exit(6)"
    assert ended.output.count("[kdist] rank 2 of 3") == ended.output.count("[kdist] rank") == reports_itself
    assert ended.output.count("kdist: rank") == 1, ended.output
    assert (DIED in ended.output) == (not reports_itself), ended.output
    # The rank's own report is summed up in the last line.
    assert ("kdist: rank 2 of 3 on host" in ended.output.splitlines()[-1]) == reports_itself, ended.output


def test_no_rank_is_named_where_the_launcher_was_killed(command, tmp_path):
    """Its proxies kill the ranks then."""
    launcher = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"  # the proxy's parent
    ended = spmd.execute([*command, f"os.kill({launcher}, 9)", str(tmp_path)], timeout=LIMIT)
    assert ended.returncode == 128 + signal.SIGKILL, ended.output
    assert "kdist: rank" not in ended.output, ended.output
    assert "for mpirun was killed by signal 9 (SIGKILL), and all ranks with it" in ended.output, ended.output


def test_a_rank_that_exits_with_0_during_training_fails_the_job():
    """Hydra may kill the others and report success."""
    cell = Cell("mpich", "os._exit 0", "epoch", 1)
    cell.check(cell.run())


def test_without_pidfd_the_job_ends_as_without_a_monitor(command, tmp_path):
    """No descriptor that Hydra waits for stays open."""
    old = "import os, sys; del os.pidfd_open; from kdist.cli.main import main; sys.exit(main(sys.argv[1:]))"
    python, *_ = command
    line = [python, "-c", old, *command[command.index("run") :]]
    ended = spmd.execute([*line, "all", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.output, ended.timed_out) == (0, "", False)


def test_a_closed_stderr_does_not_block_the_job(command, tmp_path):
    unread = "import os, sys; r, w = os.pipe(); os.dup2(w, 2); os.closerange(3, 9); os.execv(sys.argv[1], sys.argv[1:])"
    closed = [sys.executable, "-c", unread]
    ended = spmd.execute([*closed, *command, "os._exit(4)", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.timed_out) == (4, False), ended.output


def test_nothing_is_reported_without_a_failure(command, tmp_path):
    ended = spmd.execute([*command, "all", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.output) == (0, "")


@pytest.mark.timeout(LIMIT)
def test_ranks_that_ctrl_c_ends_are_not_reported_as_dead(command, tmp_path):
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
    output, _ = job.communicate()
    assert job.returncode == 130
    assert "kdist: rank" not in output
