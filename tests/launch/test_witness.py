"""Under MPICH's mpirun, which ends the other ranks before they could say which one has died."""

import os
import signal
import subprocess
import time

import pytest

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
        ("os.kill(os.getpid(), 9)", 137),
        ("os.abort()", 134),
        ("sys.exit(6)", 6),
    ],
)
def test_the_first_rank_to_die_is_named_and_no_other(command, tmp_path, end, code):
    """Before kdist is used for anything, too: nobody watches over the ranks then."""
    ended = spmd.execute([*command, end, str(tmp_path)], timeout=LIMIT)
    assert not ended.timed_out, ended.output
    assert ended.returncode == code, ended.output
    assert ended.output.count("[kdist] rank 2 of 3") == 1, ended.output
    assert ended.output.count("[kdist] rank") == 1, ended.output
    assert (DIED in ended.output) == (end != "sys.exit(6)"), ended.output


def test_nothing_is_said_when_all_is_well(command, tmp_path):
    ended = spmd.execute([*command, "all", str(tmp_path)], timeout=LIMIT)
    assert (ended.returncode, ended.output) == (0, "")


@pytest.mark.timeout(LIMIT)
def test_ranks_that_are_ended_by_ctrl_c_are_not_said_to_have_died(command, tmp_path):
    job = subprocess.Popen(
        [*command, "pass", str(tmp_path)], cwd=spmd.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while len(list(tmp_path.glob("[012]"))) < 3:
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    said, _ = job.communicate()
    assert job.returncode == 130
    assert DIED not in said
