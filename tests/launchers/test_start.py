"""The processes that kdist starts: what lies in the working directory does not get into their way."""

import os
import sys
from pathlib import Path

import pytest

import kdist
from kdist.launchers import local_cluster, process, worker
from kdist.launchers.start import module_command
from tests.helpers import spmd

PACKAGE = Path(kdist.__file__).parent
NAMES = ("argparse", "json", "logging", "platform", "secrets", "signal", "socket", "subprocess", "typing")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory is that of a project whose modules are called as some of the standard library are."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('this is the {name} of the project')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import platform, secrets, kdist\nprint(kdist.__file__)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_launcher_and_ranks_take_the_standard_library(project):
    program = worker.program(sys.executable, ["scripts/train.py"])
    command = local_cluster.build(sys.executable, program, np=2, env={})
    done = spmd.execute(list(command.argv), cwd=project, timeout=60)
    assert (done.returncode, done.output) == (0, f"{PACKAGE / '__init__.py'}\n")


def test_the_guard_takes_the_standard_library(project, capfd):
    with process.guard() as guard_session:
        guard_session(os.getpid())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranks_take_the_kdist_of_the_launcher(tmp_path, elsewhere):
    """Also where no path leads to it, as in a checkout, or leads to another one."""
    (tmp_path / "kdist").mkdir()
    (tmp_path / "kdist" / "__init__.py").write_text("raise RuntimeError('this is another kdist')")
    (tmp_path / "train.py").write_text("import kdist.errors\nprint(kdist.__file__)")
    command = [*module_command(sys.executable, worker.__name__), "train.py"]
    environment = {"PYTHONPATH": os.fspath(tmp_path) if elsewhere else ""}
    done = spmd.execute(command, cwd=tmp_path, timeout=60, env=environment)
    assert (done.returncode, done.output) == (0, f"{PACKAGE / '__init__.py'}\n")
