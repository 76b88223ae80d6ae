"""kdist as mypy and pyright see it in a user's environment, after the README's editable install."""

import re
import sys
import venv
import zipfile

import pytest

from tests.helpers import spmd
from tests.helpers.packaging import build, copy_source

# `assert_type` fails on a type that is unknown.
CORRECT = """
from typing_extensions import assert_type

import kdist
from kdist.callbacks import NaNPolicy

assert_type(kdist.rank(), int)
assert_type(kdist.cluster_info().size, int)
assert_type(kdist.callbacks.NaNPolicy("raise"), NaNPolicy)
assert_type(kdist.errors.KDistError("why"), kdist.errors.KDistError)
with kdist.scope(kdist.AllReduce(compression="fp16"), scale_lr=None, stall_timeout="auto"):
    pass
with kdist.scope() as strategy:  # not known to be a `tf.distribute.Strategy`: there is no TensorFlow here
    print(strategy.num_replicas_in_sync)


@kdist.scope("mpi", scale_lr=2, warmup_epochs=3)
def train() -> int:
    return 1


assert_type(train(), int)
"""

# Each line has one error: what is not known to a checker has none.
WRONG = """
import kdist
kdist.scope(scale_batch="yes")
kdist.no_such_name
kdist.callbacks.NaNPolicy(3)
kdist.scope(scale_lr="cubic")
kdist.AllReduce(compression="fp8")
kdist.ParameterServer(staleness="halve")
kdist.callbacks.NaNPolicy("halt")
kdist.callbacks.ReplicaCheck(action="mend")
kdist.launch(print, strategy="mip")
kdist.testing.Fault("explode")
kdist.callbacks.BackupAndRestore("backup", save_freq="batch")
"""

# The configuration that made setuptools install an import hook in place of a path.
MAPPED = "    kdist = kdist\n    kdist.callbacks = callbacks\n"

CHECKERS = {
    "mypy": lambda python: [sys.executable, "-m", "mypy", "--no-incremental", "--python-executable", python],
    "pyright": lambda python: [sys.executable, "-m", "pyright", "--pythonpath", python],
}


def user_environment(tmp_path, config=None):
    """Makes a virtual environment with kdist alone, installed as `pip install --editable` does it."""
    source = copy_source(tmp_path / "source")
    if config:
        (source / "setup.cfg").write_text(config)
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(build("editable", source, tmp_path / "dist")).extractall(packages)
    return tmp_path / "venv" / "bin" / "python"


def errors(checker, python, **scripts):
    """Returns the numbers of the lines with errors, a set for each script, and all that the checker prints."""
    project = python.parents[2] / "project"
    project.mkdir()
    for name, script in scripts.items():
        (project / f"{name}.py").write_text(script)
    # Without the checkout, which the tests' own path may name.
    command = [*CHECKERS[checker](str(python)), *(f"{name}.py" for name in scripts)]
    done = spmd.execute(command, cwd=project, env={"PYTHONPATH": ""}, timeout=120)
    assert bool(re.search(r"Success|\b0 errors", done.output)) == (done.returncode == 0), done.output
    found = re.findall(r"(\w+)\.py:(\d+)[:\d]* (?:-\s)?error", done.output)
    return [{int(line) for each, line in found if each == name} for name in scripts], done.output


@pytest.mark.parametrize("checker", CHECKERS)
def test_what_is_correct_is_accepted_and_what_is_wrong_is_seen(checker, tmp_path):
    (correct, wrong), output = errors(checker, user_environment(tmp_path), correct=CORRECT, wrong=WRONG)
    assert not correct, output
    assert wrong == set(range(3, 14)), output


@pytest.mark.parametrize("checker", CHECKERS)
def test_an_import_hook_is_not_followed(checker, tmp_path):
    config = (spmd.ROOT / "setup.cfg").read_text()
    assert "    = .\n" in config
    config = config.replace("    = .\n", MAPPED)
    (lines,), output = errors(checker, user_environment(tmp_path, config), correct=CORRECT)
    assert lines, output
