"""`kdist install-horovod`: what is refused, what is kept, and the report of a failed build.

That it builds, installs and tries Horovod is seen by `tests/run`, which does so before the tests run.
"""

import os
import re
import sys

from kdist.cli import main as cli
from tests.helpers import needs, spmd

KDIST = [sys.executable, "-m", "kdist.cli.main", "install-horovod"]


def test_an_unknown_version_is_refused(capsys):
    assert cli.main(["install-horovod", "--version", "1.0"]) == 2
    assert "--version 1.0" in capsys.readouterr().err


def test_missing_prerequisites_are_named_before_the_build(tmp_path):
    # A Python that stands alone: no compiler and no mpicxx beside it or on the path.
    (tmp_path / "python").symlink_to(sys.executable)
    env = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), "CXX": ""}
    done = spmd.execute([str(tmp_path / "python"), *KDIST[1:], "--force"], env=env, timeout=60)
    assert done.returncode == 2, done.output
    assert re.search(r"C\+\+ compiler +missing", done.output)
    assert re.search(r"MPI +missing", done.output)
    assert "apt-get install g++" in done.output
    assert "downloading" not in done.output


@needs.horovod
def test_one_that_works_is_kept():
    done = spmd.execute([*KDIST, *without_mpi()], timeout=240)
    assert done.returncode == 0, done.output
    assert "is kept" in done.output
    assert "building" not in done.output


def without_mpi():
    """Returns the options for the installed Horovod."""
    import importlib.metadata

    return ["--without-mpi"] if "gloo" in importlib.metadata.version("horovod") else []


def test_a_build_that_fails_shows_its_first_error_and_keeps_its_log(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cc:1:2: fatal error: this compiler never works' >&2\nexit 1\n")
    compiler.chmod(0o755)
    env = {"CXX": str(compiler), "TMPDIR": str(tmp_path)}
    done = spmd.execute([*KDIST, "--force", "--wheel-dir", str(tmp_path / "wheels")], env=env, timeout=240)
    assert done.returncode == 2, done.output
    assert "The build of Horovod failed" in done.output
    assert "this compiler never works" in done.output
    (log,) = tmp_path.glob("kdist-horovod-*.log")
    assert str(log) in done.output
    assert "CMake" in log.read_text()
    assert not list((tmp_path / "wheels").iterdir())
