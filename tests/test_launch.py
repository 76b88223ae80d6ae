"""`kdist.launch`: notebooks of the examples and the guide in a real Jupyter kernel, errors, an interrupt, refusals."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

import kdist
from kdist.errors import EngineError, LaunchError
from kdist.launchers.functions import launch as functions
from kdist.launchers.functions import rank_program
from tests.docs.guide import PAGES, fences
from tests.helpers import spmd

LIMIT = 240  # seconds for a cell

# The rank finds a module of the caller's path.
RAISES = """
import os, sys
os.makedirs("of_mine")
with open("of_mine/a_module_of_mine.py", "w") as file:
    file.write("WHAT = 'no such column'")
sys.path.insert(0, os.path.abspath("of_mine"))
import a_module_of_mine

def fails_on_one_rank():
    with kdist.scope():
        kdist.barrier()
        if kdist.rank() == 1:
            raise KeyError(a_module_of_mine.WHAT)
        kdist.barrier()

kdist.launch(fails_on_one_rank, np=2)
"""

# As by the kernel, when memory runs out: the rank that is left raises.
KILLED = """
import os

def is_killed_on_one_rank():
    with kdist.scope():
        kdist.barrier()
        if kdist.rank() == 1:
            os.kill(os.getpid(), 9)
        kdist.barrier()

kdist.launch(is_killed_on_one_rank, np=2, strategy="collective")
"""

# It interrupts itself, as a click does, when the ranks are in the scope and rank 0 was heard to say so.
INTERRUPTED = """
import contextlib, io, os, signal, tempfile, threading, time
started, shown = tempfile.mkdtemp(), io.StringIO()

def trains_for_ever():
    with kdist.scope():
        kdist.barrier()
        print("begins", flush=True)
        while True:
            open(os.path.join(started, str(os.getpid())), "w").close()
            time.sleep(0.1)

def interrupt():
    while len(os.listdir(started)) < 2 or "begins" not in shown.getvalue():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    with contextlib.redirect_stdout(shown):
        kdist.launch(trains_for_ever, np=2)
except KeyboardInterrupt:
    print("interrupted", *os.listdir(started))
"""


KILLED_BY = r"kdist: rank 1 on host \S+ was killed by signal 9 \(SIGKILL\)"


def said(cell):
    """Returns what a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


@pytest.mark.starts_processes  # a kernel
def test_a_notebook(monkeypatch, tmp_path):
    for name, value in {**spmd.RANK_ENVIRONMENT, **spmd.WITH_SKLEARN}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(spmd.ROOT / "examples" / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        training, evaluation = notebook.cells[-2:]
        assert "2 ranks train together" in said(training)
        assert "Epoch 5/5" in said(training)
        assert said(training).count("Epoch 5/5") == 1
        assert float(re.search(r"test accuracy: (\S+)", said(evaluation))[1]) > 0.9

        ((_, shown),) = fences(PAGES["notebooks"].read_text(), "py")
        checked = f"{shown}\nassert len(history['loss']) == 5 and len(weights) == 2"
        cells = (checked, RAISES, KILLED, INTERRUPTED)
        guides, raising, killed, interrupted = map(nbformat.v4.new_code_cell, cells)
        notebook.cells += [guides, raising, killed, interrupted]
        client.execute_cell(guides, len(notebook.cells) - 4)
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyError") as raised:
            client.execute_cell(raising, len(notebook.cells) - 3)
        assert "rank 1 of 2 raised" in str(raised.value)
        assert "no such column" in str(raised.value)
        assert "[kdist] rank" not in said(raising)  # once, by the exception

        with pytest.raises(nbclient.exceptions.CellExecutionError, match="EngineError|LaunchError") as raised:
            client.execute_cell(killed, len(notebook.cells) - 2)
        assert re.search(KILLED_BY, said(killed) + str(raised.value))

        client.execute_cell(interrupted, len(notebook.cells) - 1)
    word, *ranks = said(interrupted).splitlines()[-1].split()
    assert word == "interrupted"
    assert len(ranks) == 2
    limit = time.monotonic() + 5
    while (left := [rank for rank in ranks if Path("/proc", rank).exists()]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left


@pytest.mark.parametrize(
    ("error", "held", "told"),
    [
        (EngineError("rank 1 has ended"), "[kdist] rank 0 ...\nkdist: rank 1 on host a was killed\nkdist: Fix: x\n", 2),
        (EngineError("rank 1 has ended"), "kdist: rank 0 of 2 on host a raised EngineError\n", 1),
        (KeyError("x"), "kdist: rank 0 of 2 on host a raised KeyError\nkdist: Fix: x\n", 0),  # the exception itself
        (KeyError("x"), "kdist: rank 1 on host a was killed\n", 1),
    ],
)
def test_the_cause_says_what_is_known_beyond_the_exception(error, held, told, tmp_path):
    rank_program._write(tmp_path / rank_program.ERROR.format(0), rank_program._pickled_error(error))
    with pytest.raises(type(error)) as raised:
        functions._raise(tmp_path / rank_program.ERROR.format(0), 2, held)
    assert str(raised.value) == str(error)
    assert re.findall("^kdist: ", str(raised.value.__cause__), re.MULTILINE) == ["kdist: "] * told


class Target(io.StringIO):
    """What a script may put in the place of `sys.stdout`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if not text.isascii() or not isinstance(self.error, UnicodeError):
            raise self.error
        return super().write(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [BrokenPipeError(), UnicodeEncodeError("ascii", "é", 0, 1, "no"), None])
def test_output_that_cannot_be_written_does_not_stop_the_ranks(error, monkeypatch):
    """They write more than a pipe holds."""
    target = None if error is None else Target(error)
    monkeypatch.setattr(sys, "stdout", target)
    code = "import sys; [sys.stdout.buffer.write(b'\\xc3\\xa9' * 1000) for _ in range(200)]"
    assert functions._run([sys.executable, "-c", code], os.environ, failed=lambda: False) == (0, "")
    if isinstance(error, UnicodeError):
        assert target.getvalue() == r"\xe9" * 200_000


def test_what_is_no_function_is_refused():
    with pytest.raises(LaunchError, match=r"(?s)Received: 3\. .*without parentheses"):
        kdist.launch(3)


def test_what_cannot_be_sent_is_refused():
    generator = (each for each in [1])
    with pytest.raises(LaunchError, match=r"(?s)cannot be sent to the ranks.*inside of the function"):
        kdist.launch(lambda: next(generator))


@pytest.mark.parametrize("wrong", [0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(wrong):
    with pytest.raises(LaunchError, match="no number of ranks"):
        kdist.launch(print, np=wrong)
