"""`kdist run` under the real mpirun: exit codes, output, and the end of a job after a failure."""

import fcntl
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time

import pytest

from kdist.cli.jobs.started_job import make_directory
from kdist.errors import LaunchError
from kdist.reports.output import labelled
from tests.helpers import spmd

KDIST = [sys.executable, "-m", "kdist.cli.main"]
SCRIPT = """
import os, sys, time
from kdist.cluster import detect
info = detect(os.environ)
print(f"out {info.rank} of {info.size} {sys.argv[1:]} {os.environ.get('KDIST_STRATEGY')}")
print(f"err {info.rank}", file=sys.stderr)
how = sys.argv[1]
if "mpi" in how:
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == info.size
if info.rank == 1 or "all" in how:
    if "raise" in how: raise ValueError("boom")
    if "exit" in how: sys.exit(7)
    if "crash" in how: os.abort()
if "wait" in how:
    if "mpi" in how: MPI.COMM_WORLD.Barrier()
    time.sleep(300)
if "noise" in how: print("I0000 00:00:1795632424.849653 705 port.cc:153] oneDNN is on.", file=sys.stderr)
if "cores" in how: print("cores", *sorted(os.sched_getaffinity(0)))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments, ranks=2, timeout=60, env=None):
    done = spmd.execute([*KDIST, "run", "-np", str(ranks), *arguments], timeout=timeout, env=env)
    assert not done.timed_out, done.output
    return done


@pytest.mark.parametrize(("ranks", "is_far_more"), [(4, False), (5, True)])
def test_far_more_ranks_than_cores_are_remarked_on(ranks, is_far_more, script):
    core = min(os.sched_getaffinity(0))
    bound = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", bound, *KDIST, "run", "-np", str(ranks), script, "quick"]
    done = spmd.execute(command, timeout=60)
    assert done.returncode == 0, done.output
    assert (f"kdist: {ranks} ranks on 1 core(s): they train no faster than 1 would" in done.output) == is_far_more
    assert f"out 0 of {ranks}" in done.output


def cores(said):
    """Returns on which cores a rank may run."""
    (found,) = re.findall(r"^cores (.*)", said, re.MULTILINE)
    return [int(core) for core in found.split()]


def test_only_the_output_of_rank_0_is_shown(script):
    done = run("--strategy", "mpi", script, "mpi", "--epochs", "5", ":", "x", ranks=3)
    assert done.returncode == 0, done.output
    assert "out 0 of 3 ['mpi', '--epochs', '5', ':', 'x'] mpi" in done.output
    assert "err 0" in done.output
    assert "out 1" not in done.output
    assert "err 1" not in done.output


def test_output_has_the_files_of_every_rank(script, tmp_path):
    done = run("--output", str(tmp_path / "logs" / "today"), script, "mpi cores", ranks=3)
    assert done.returncode == 0, done.output
    kept = {path.name: path.read_text() for path in (tmp_path / "logs" / "today").iterdir()}
    assert sorted(kept) == [f"rank{rank}.{end}" for rank in range(3) for end in ("err", "out")]
    for rank in range(3):
        assert f"out {rank} of 3" in kept[f"rank{rank}.out"]
        assert kept[f"rank{rank}.err"].splitlines() == [f"err {rank}"]
        assert cores(kept[f"rank{rank}.out"]) == sorted(os.sched_getaffinity(0))  # bound to none
    assert "out 0 of 3" in done.output
    assert "err 0" in done.output
    assert "out 1" not in done.output
    assert f"the output of each rank is in {tmp_path / 'logs' / 'today'}" in done.output


def test_tee_shows_all_ranks_with_rank_and_time(script, tmp_path):
    done = run("--tee", "--output", str(tmp_path), script, "mpi noise")
    assert done.returncode == 0, done.output
    for rank in range(2):
        for line in (f"out {rank} of 2 ['mpi noise'] None", f"err {rank}"):
            assert re.search(rf"^\[rank {rank} \d\d:\d\d:\d\d\] {re.escape(line)}$", done.output, re.M), done.output
    assert (tmp_path / "rank1.out").read_text() == "out 1 of 2 ['mpi noise'] None\n"
    assert done.output.count("oneDNN is on") == 1, done.output  # of rank 0
    assert "oneDNN is on" in (tmp_path / "rank1.err").read_text()


def test_lines_with_a_label():
    shown = labelled(b"a\n1/2\r2/2\r\nb", "rank 3").decode()
    assert [line.partition("] ")[2] for line in shown.splitlines()] == ["a", "2/2", "b"]
    assert shown.startswith("[rank 3 ")


def test_a_breakpoint_on_one_rank_reads_the_terminal(tmp_path):
    """Several go on, with a hint: tests/transcripts."""
    (tmp_path / "stop.py").write_text("x = 41\nbreakpoint()\nprint('after', x + 1)")
    line = shlex.join([*KDIST, "run", "-np", "1", str(tmp_path / "stop.py")])
    done = spmd.execute(["bash", "-c", f"printf 'p 6 * 7 * 10\\nc\\n' | {line}"], timeout=60)
    assert done.returncode == 0, done.output
    assert "after 42" in done.output
    assert "420" in done.output


def test_one_rank_reads_what_is_typed(tmp_path):
    """At a terminal, of whose session the ranks are not."""
    (tmp_path / "ask.py").write_text("print('said', input('say: '))\nbreakpoint()\nprint('after')\n")
    terminal, of_job = os.openpty()

    def at_terminal():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which `pytest &` ignores, and `kdist run` then, too
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    job = subprocess.Popen(
        [*KDIST, "run", "-np", "1", str(tmp_path / "ask.py")],
        env={**os.environ, **spmd.RANK_ENVIRONMENT},
        stdin=of_job,
        stdout=of_job,
        stderr=of_job,
        start_new_session=True,
        preexec_fn=at_terminal,
    )
    seen = b""

    def type_at(prompt, keys):
        nonlocal seen
        limit = time.monotonic() + 30 * spmd.PATIENCE
        while prompt not in seen:
            assert time.monotonic() < limit, seen.decode()
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096)
        seen = seen.partition(prompt)[2]
        os.write(terminal, keys)

    try:
        has_echo = termios.tcgetattr(terminal)[3] & termios.ECHO
        type_at(b"say: ", b"hello\n")
        type_at(b"said hello", b"")
        type_at(b"(Pdb) ", b"p 6 * 7 * 10\n")
        type_at(b"420", b"")
        type_at(b"(Pdb) ", b"\x03")
        assert job.wait(30 * spmd.PATIENCE) == 130
        assert termios.tcgetattr(terminal)[3] & termios.ECHO == has_echo
    finally:
        job.kill()  # its guard ends the rank
        job.wait()
        os.close(of_job)
        os.close(terminal)


@pytest.mark.parametrize("how", ["raise wait", "mpi raise wait"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_rank_that_raises_ends_the_job_with_one_report(script, tmp_path, how, keep):
    done = run(*(["--output", str(tmp_path / "logs")] if keep else []), script, how)
    assert done.returncode == 1
    assert done.output.count("[kdist] rank 1 of 2 on host") == 1
    assert done.output.count("ValueError: boom") == 1
    # Its own frames only: the script is what failed, not what ran it.
    assert "script.py" in done.output
    assert "worker.py" not in done.output
    # What the failing rank had written to stderr is shown too.
    assert "err 1" in done.output
    # The last line is kdist's, not a box of mpirun.
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("kdist: rank 1 of 2 on host "), done.output
    assert "raised ValueError in script.py:12; the job's exit code is 1" in last
    assert (f"its output is in {tmp_path / 'logs' / 'rank1.err'}" in last) == keep
    for word in ("prterun", "MPI_ABORT", "-----"):
        assert word not in done.output
    if keep:
        assert "ValueError: boom" in (tmp_path / "logs" / "rank1.err").read_text()


def test_an_error_on_all_ranks_is_reported_once(script):
    done = run(script, "all raise")
    assert done.returncode == 1
    assert done.output.count("ValueError: boom") == 1


@pytest.mark.parametrize("how", ["exit wait", "mpi exit wait", "all exit"])
def test_an_exit_code_is_passed_on(script, how):
    done = run(script, how)
    assert done.returncode == 7
    assert "exited with code 7" in done.output


def test_a_rank_that_crashes_is_reported(script):
    done = run(script, "crash wait")
    assert done.returncode not in (0, None)
    assert "Fatal Python error: Aborted" in done.output
    assert "err 1" in done.output


def test_a_module(tmp_path):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(1 / 0)")
    done = run("-m", "a_package", "-np", "9", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.output
    assert "['-np', '9'] __main__" in done.output
    assert " raised ZeroDivisionError in __main__.py:3; " in done.output.splitlines()[-1]


def test_hosts_and_launcher_args(script, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    bound = ["--launcher-args", "--bind-to core --map-by core"]  # Open MPI takes no option twice
    done = spmd.execute([*KDIST, "run", "--hostfile", str(tmp_path / "hosts"), *bound, script, "cores"], timeout=60)
    assert "out 0 of 2" in done.output
    assert len(cores(done.output)) < len(os.sched_getaffinity(0)) or os.cpu_count() == 1
    done = run("-H", "localhost:2", "--dry-run", "--launcher-args", "-x 'A B'", script, "ok", "it's")
    assert done.returncode == 0
    assert "-x 'A B'" in done.output
    assert "out 0" not in done.output
    # What is printed can be pasted into a shell.
    printed = run("--dry-run", script, "ok", "it's; exit 3").output
    pasted = spmd.execute(["bash", "-c", printed], timeout=60)
    assert pasted.returncode == 0, pasted.output
    assert "it's; exit 3" in pasted.output


def test_an_output_directory_that_cannot_be_written_to_is_named_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(LaunchError, match="output directory cannot be created. Received: --output .*Permission denied"):
        make_directory(str(tmp_path / "out"))
