"""Rank 0 reads the standard input of `kdist run` to its end, under a real mpirun; no other rank reads any."""

import os
import sys

import pytest

from kdist.cli.jobs.standard_input import input_path
from tests.helpers import spmd

SCRIPT = """
import os, sys
print(f"rank {os.environ['OMPI_COMM_WORLD_RANK']} reads {sys.stdin.read()!r}", flush=True)
"""


@pytest.mark.parametrize(
    ("given", "read"),
    [("printf 'a\\nb\\n' |", "a\\nb\\n"), ("< in.txt", "of a file"), ("< /dev/null", ""), ("<&-", "")],
)
def test_rank_0_reads_to_the_end(given, read, tmp_path):
    script = tmp_path / "reads.py"
    script.write_text(SCRIPT)
    (tmp_path / "in.txt").write_text("of a file")
    run = f"{sys.executable} -m kdist.cli.main run -np 2 --tee {script}"
    line = f"{given} {run}" if given.endswith("|") else f"{run} {given}"
    done = spmd.execute(["bash", "-c", line], env=spmd.RANK_ENVIRONMENT, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert f"rank 0 reads '{read}'" in done.output, done.output
    assert "rank 1 reads ''" in done.output, done.output


def test_a_named_pipe_whose_writer_has_ended_does_not_block(tmp_path):
    script, pipe = tmp_path / "reads.py", tmp_path / "pipe"
    script.write_text(SCRIPT)
    os.mkfifo(pipe)
    line = f"(echo of a pipe > {pipe}) & {sys.executable} -m kdist.cli.main run -np 2 --tee {script} < {pipe}"
    done = spmd.execute(["bash", "-c", line], env=spmd.RANK_ENVIRONMENT, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "rank 0 reads 'of a pipe" in done.output, done.output


def test_what_the_launcher_passes_on(tmp_path):
    """A terminal, a file of which something has been read, and all but `/dev/null` where ranks are on other hosts."""
    path = tmp_path / "in.txt"
    path.write_text("two lines\nof it\n")
    own = os.dup(0)
    controller, terminal = os.openpty()
    try:
        with path.open() as file:
            os.dup2(file.fileno(), 0)
            assert input_path(is_on_several_hosts=True) is None
            assert input_path(is_on_several_hosts=False) == f"/proc/{os.getpid()}/fd/0"
            os.read(0, 4)
            assert input_path(is_on_several_hosts=False) is None
        os.dup2(terminal, 0)
        assert input_path(is_on_several_hosts=False) is None
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            assert input_path(is_on_several_hosts=True) == os.devnull
    finally:
        os.dup2(own, 0)
        for each in (own, controller, terminal):
            os.close(each)
