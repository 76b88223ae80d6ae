"""A script runs under the worker as under Python itself."""

import json
import sys
import uuid
from pathlib import Path

import pytest

from kdist.launchers import worker
from kdist.restarts import request
from tests.helpers import spmd

WORKER = worker.program(sys.executable, ())
LOOK = """
import json, sys
main = sys.modules["__main__"]
def annotated(x: int): "Postponed annotations must not leak in from the worker."
print(json.dumps([sys.argv, sys.path, __name__, __file__, __package__, main.__dict__ is globals(),
                  __spec__ and __spec__.name, sorted(set(globals()) - {"neighbour", "__annotations__"}),
                  str((lambda f: f.__annotations__)(annotated))]))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "scripts" / "package").mkdir(parents=True)
    (tmp_path / "scripts" / "neighbour.py").write_text("")
    (tmp_path / "scripts" / "look.py").write_text("import neighbour\n" + LOOK)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "look.py").write_text(LOOK)
    return tmp_path


def both(project, *arguments):
    """Runs Python with the arguments, and the worker with the same."""
    python = spmd.execute([sys.executable, *arguments], cwd=project, timeout=60)
    is_module = arguments[:1] == ("-m",)
    program = worker.program(sys.executable, arguments[is_module:], module=is_module)
    return python, spmd.execute(program, cwd=project, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [["scripts/look.py", "--epochs", ":", "-m"], ["-m", "package.look", "--output", "-h", ":", ":", "colon"]],
)
def test_the_same_modules_and_arguments(project, arguments):
    python, ours = both(project, *arguments)
    assert json.loads(ours.output) == json.loads(python.output)
    assert (ours.returncode, python.returncode) == (0, 0)


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError('boom')",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('words')",
        "import sys; sys.exit()",
        "def f(: pass",
        "import kdist_has_no_such_module",
    ],
)
def test_the_same_exit(project, line):
    (project / "end.py").write_text(line)
    python, ours = both(project, "end.py")
    assert ours.returncode == python.returncode
    assert ours.output.replace(str(project) + "/", "") == python.output.replace(str(project) + "/", "")


def test_an_interrupt_has_no_report(project):
    (project / "end.py").write_text("raise KeyboardInterrupt")
    _, ours = both(project, "end.py")
    assert (ours.returncode, ours.output) == (130, "")


def test_missing_arguments(project):
    _, ours = both(project)
    assert ours.returncode == 2
    assert "a script or -m MODULE" in ours.output


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("pass", []),
        ("import sys; sys.exit()", []),
        ("raise ValueError", ["0"]),
        ("import sys; sys.exit(7)", ["0"]),
        ("import os; os._exit(0)", ["0"]),
    ],
)
def test_a_rank_has_a_file_until_it_succeeds(project, line, left):
    running = project / f"running-{uuid.uuid4().hex}"
    running.mkdir()
    (project / "end.py").write_text(f"import os; assert os.listdir({str(running)!r}) == ['0']\n{line}")
    command = [*WORKER, "--running", str(running), "end.py"]
    asked = Path(request.path_of(running, request.NOTICE))  # on this host, which may not be that of `kdist run`
    asked.touch()
    spmd.execute(command, cwd=project, timeout=60)
    assert [path.name for path in running.iterdir()] == left
    assert asked.exists() == bool(left)
    asked.unlink(missing_ok=True)


def test_a_rank_of_another_host_has_no_file(project):
    (project / "end.py").write_text("print('ended')")
    command = [*WORKER, "--running", str(project / "elsewhere"), "end.py"]
    done = spmd.execute(command, cwd=project, timeout=60)
    assert (done.returncode, done.output) == (0, "ended\n")
