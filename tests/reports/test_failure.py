"""The hook: installed once, reports once, ends the job with the right code."""

import sys

import pytest

from kdist.errors import MismatchError
from kdist.reports import failure
from kdist.reports.output import REPORT_PREFIX
from tests.helpers import spmd


@pytest.fixture
def excepthook():
    before = sys.excepthook
    sys.excepthook = sys.__excepthook__
    yield
    sys.excepthook = before


def test_installed_once_and_the_last_abort_counts(excepthook):
    first = failure.install(lambda code: None, 0, 2)
    abort = lambda code: None  # noqa: E731
    assert failure.install(abort, 1, 3) is first
    assert sys.excepthook is first
    assert (first.abort, first.rank, first.size) == (abort, 1, 3)
    assert first.previous is sys.__excepthook__
    failure.EarlyHook(0, 2).install()
    assert failure.install(abort, 1, 3).previous is sys.__excepthook__


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(7), 7),
        (SystemExit(-1), 255),
        (SystemExit("words"), 1),
    ],
)
def test_exit_codes_are_those_of_a_shell(error, code):
    assert failure.exit_code(error) == code


def script(tmp_path, abort, rank, raised):
    path = tmp_path / "script.py"
    path.write_text(f"""
import os, sys, time
from kdist.errors import MismatchError
from kdist.reports import failure
def abort(code):
    print("abort", code, "after", round(time.monotonic() - start, 1) >= 1.0, flush=True)
    {abort}
failure.install(abort, {rank}, 4)
failure.install(abort, {rank}, 4)
start = time.monotonic()
{raised}
""")
    return spmd.execute([sys.executable, str(path)], timeout=60)


def test_rank_0_reports_once_without_a_delay(tmp_path):
    done = script(tmp_path, "os._exit(code)", 0, "raise ValueError('boom')")
    assert done.returncode == 1
    assert done.output.count("[kdist] rank 0 of 4 on host") == 1
    assert done.output.count("ValueError: boom") == 1
    assert "abort 1 after False" in done.output


def test_other_ranks_report_after_a_delay(tmp_path):
    assert MismatchError.on_all_ranks
    done = script(tmp_path, "os._exit(code)", 2, "raise MismatchError('models')")
    assert done.returncode == 1
    assert done.output.count("[kdist] rank 2 of 4 on host") == 1
    assert "abort 1 after True" in done.output
    assert done.seconds > 2


def test_one_of_several_ranks_reports(tmp_path):
    """The others write to their files what no terminal shows: it has no mark. UTF-8 cannot write every text."""
    ranks = [
        "from pathlib import Path",
        "from kdist.reports.scope_marks import own_scopes",
        f"own_scopes.directory, failure._DELAY_OF_CONSEQUENCES = Path({str(tmp_path)!r}), 0.5",
    ]
    raised = "\n".join([*ranks, r"raise ValueError('a\ud800')"])
    first, second = (script(tmp_path, "os._exit(code)", 2, raised) for _ in "ab")
    assert first.output.startswith("\n[kdist] rank 2 of 4 on host"), "it begins a line"
    assert second.output.startswith("kdist (another rank failed first): rank 2 of 4 on host")
    assert REPORT_PREFIX not in second.output
    assert first.output.count("ValueError: a") == second.output.count("ValueError: a") == 1
    assert r"ValueError: a\ud800" in (tmp_path / "report").read_text()
    assert (first.returncode, second.returncode) == (1, 1)
    denied = script(tmp_path, "os._exit(code)", 2, "sys.excepthook.may_report = lambda: False\nraise ValueError('a')")
    assert "ValueError" not in denied.output
    assert denied.returncode == 1


def test_an_interrupt_has_no_report(tmp_path):
    done = script(tmp_path, "os._exit(code)", 0, "raise KeyboardInterrupt")
    assert done.returncode == 130
    assert done.output == "abort 130 after False\n"


def test_an_abort_that_fails_still_ends_the_process(tmp_path):
    done = script(tmp_path, "raise OSError('no MPI')", 0, "raise ValueError('boom')")
    assert done.returncode == 1
    assert "ValueError: boom" in done.output


def test_a_hook_of_the_user_prints_the_traceback(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\nfrom kdist.reports import failure\n"
        "sys.excepthook = lambda kind, error, trace: print('mine:', error)\n"
        "failure.install(os._exit, 0, 2)\nraise ValueError('boom')\n"
    )
    done = spmd.execute([sys.executable, str(path)], timeout=60)
    assert "mine: boom" in done.output
    assert "Traceback" not in done.output
    assert "[kdist] rank 0 of 2" in done.output


def test_an_error_that_cannot_be_reported_is_shown_by_python(tmp_path):
    raised = "class Odd(ValueError):\n    def __str__(self): raise TypeError('no words')\nraise Odd('boom')"
    done = script(tmp_path, "os._exit(code)", 0, raised)
    assert done.returncode == 1
    assert "[kdist] rank 0 of 4 on host" in done.output
    assert "line 13, in <module>" in done.output
    assert "Odd: <exception str() failed>" in done.output


def test_under_plain_mpirun_a_rank_that_raises_ends_the_job(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import time\nfrom mpi4py import MPI\nfrom kdist.reports import failure\nworld = MPI.COMM_WORLD\n"
        "failure.install(world.Abort, world.rank, world.size)\n"
        "if world.rank == 1: raise ValueError('boom')\nworld.Barrier()\n"
    )
    done = spmd.launch([sys.executable, str(path)], 2, timeout=60)
    assert not done.timed_out
    assert done.returncode not in (0, None)
    assert done.output.count("[kdist] rank 1 of 2") == 1
    assert done.output.count("ValueError: boom") == 1
