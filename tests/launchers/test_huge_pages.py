"""A rank asks for huge pages, and gets them when it has started."""

import sys

import pytest

from kdist.launchers import worker
from tests.helpers import spmd

ASKS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ARE_OFF = "import ctypes; off = lambda: ctypes.CDLL(None).prctl(42, 0, 0, 0, 0)\n"  # PR_GET_THP_DISABLE


def states(program, env):
    done = spmd.execute(program, env=env, timeout=60)
    assert done.returncode == 0, done.output
    return done.output.split()


@pytest.mark.parametrize(("env", "expected"), [(ASKS, ["1", "0"]), ({"GLIBC_TUNABLES": ""}, ["0", "0"])])
def test_they_come_when_the_time_is_over(env, expected):
    script = "import os, time; from kdist.launchers import huge_pages; huge_pages.allow_later(os.environ, 0.5)\n"
    script += ARE_OFF + "print(off()); time.sleep(2); print(off())"
    assert states([sys.executable, "-c", script], env) == expected


def test_a_process_that_may_have_none_keeps_having_none():
    script = "import os, time; from kdist.launchers import huge_pages\n" + ARE_OFF
    script += "ctypes.CDLL(None).prctl(41, 1, 0, 0, 0); huge_pages.allow_later(os.environ, 0.1)\n"
    assert states([sys.executable, "-c", script + "time.sleep(1); print(off())"], ASKS) == ["1"]


def test_a_script_begins_without_them(tmp_path):
    (tmp_path / "script.py").write_text(ARE_OFF + "print(off())")
    program = worker.program(sys.executable, [str(tmp_path / "script.py")])
    assert states(program, ASKS) == ["1"]
