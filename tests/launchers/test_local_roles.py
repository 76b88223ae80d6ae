"""The local launcher with parameter servers: roles by TF_CONFIG, and the restart of a worker that was killed."""

import json
import sys

import pytest

from kdist.errors import LaunchError
from kdist.launchers import local_cluster
from tests.helpers import spmd

HEAD = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']} {task['index']}"
folder = pathlib.Path(sys.argv[1])
def wait_for(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
def words(path):
    return path.read_text().split() if path.exists() else []
"""

# Every task notes that it started. What `act` says is done by the first worker when it starts for the first time. The
# chief is there as long as somebody may have to be started again.
PROGRAM = """
with open(folder / name, "a") as file:
    file.write("started ")
if name == sys.argv[2] and len(words(folder / name)) == 1:
    sys.exit(3) if sys.argv[3] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
if name == "chief 0" and sys.argv[3] == "kill":
    wait_for(lambda: len(words(folder / sys.argv[2])) == 2)
"""


def run(tmp_path, program, *arguments):
    (tmp_path / "program.py").write_text(HEAD + program)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), *arguments]
    return spmd.execute(local_cluster.build(sys.executable, command, np=4, ps=1, env={}).argv, timeout=90)


def launched(tmp_path, who, how):
    done = run(tmp_path, PROGRAM, who, how)
    return done, {name: (tmp_path / name).read_text().split() for name in TASKS if (tmp_path / name).exists()}


TASKS = ("chief 0", "worker 0", "worker 1", "ps 0")


def test_a_killed_worker_is_restarted(tmp_path):
    done, started = launched(tmp_path, "worker 1", "kill")
    assert done.returncode == 0, done.output
    assert {name: len(times) for name, times in started.items()} == {**dict.fromkeys(TASKS, 1), "worker 1": 2}
    assert "SIGKILL" in done.output


# The chief stops the launcher, and lets it go on when both workers are dead.
TOGETHER = """
def pids(number):
    return [words(path) for path in folder.glob("worker*") if len(words(path)) == number]
if task["type"] == "worker":
    with open(folder / name, "a") as file:
        file.write(f"{os.getpid()} ")
    if len(words(folder / name)) == 1:
        time.sleep(60)
if task["type"] == "chief":
    wait_for(lambda: len(pids(1)) == 2)
    workers = [int(pid) for (pid,) in pids(1)]
    os.kill(os.getppid(), signal.SIGSTOP)
    wait_for(lambda: " T " in pathlib.Path(f"/proc/{os.getppid()}/stat").read_text())
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(" Z " in pathlib.Path(f"/proc/{pid}/stat").read_text() for pid in workers))
    os.kill(os.getppid(), signal.SIGCONT)
    wait_for(lambda: len(pids(2)) == 2)
"""


def test_workers_that_are_killed_together_are_both_restarted(tmp_path):
    done = run(tmp_path, TOGETHER)
    assert done.returncode == 0, done.output
    for rank in (1, 2):
        assert f"rank {rank} of 4 was killed by signal 9 (SIGKILL), and is restarted" in done.output


# A worker dies when the launcher has seen the end of the chief, which waits for nobody.
LATE = """
if task["type"] == "chief":
    (folder / "being written").write_text(str(os.getpid()))
    (folder / "being written").rename(folder / "chief")
if name == "worker 1":
    wait_for(lambda: words(folder / "chief") and not pathlib.Path("/proc", *words(folder / "chief")).exists())
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_is_killed_after_the_chief_exited_is_not_restarted(tmp_path):
    done = run(tmp_path, LATE)
    assert done.returncode == 0, done.output
    assert "is restarted" not in done.output


@pytest.mark.parametrize(
    ("who", "how", "code"), [("worker 0", "exit", 3), ("ps 0", "kill", 137), ("chief 0", "kill", 137)]
)
def test_any_other_failure_ends_the_job(tmp_path, who, how, code):
    done, started = launched(tmp_path, who, how)
    assert done.returncode == code, done.output
    assert len(started[who]) == 1


def test_one_cluster_for_all():
    configs = [json.loads(each) for each in local_cluster.configurations(5, ps=2)]
    assert [f"{each['task']['type']} {each['task']['index']}" for each in configs] == [
        "chief 0",
        "worker 0",
        "worker 1",
        "ps 0",
        "ps 1",
    ]
    assert all(each["cluster"] == configs[0]["cluster"] for each in configs)
    addresses = [address for own in configs[0]["cluster"].values() for address in own]
    assert len(set(addresses)) == 5


def test_too_few_ranks_are_refused():
    with pytest.raises(LaunchError, match="at least -np 4"):
        local_cluster.build("python", ["x.py"], np=3, ps=2, env={})
