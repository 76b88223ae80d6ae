"""`kdist.launch`: the example notebook in a real Jupyter kernel, an error, an interrupt, and what it refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

import kdist
from kdist.errors import LaunchError
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

kdist.launch(fails_on_one_rank, np=2, strategy="collective")
"""

# It interrupts itself, as a click does, when the ranks have started.
INTERRUPTED = """
import os, signal, tempfile, threading, time
started = tempfile.mkdtemp()

def trains_for_ever():
    while True:
        open(os.path.join(started, str(os.getpid())), "w").close()
        time.sleep(0.1)

def interrupt():
    while len(os.listdir(started)) < 2:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    kdist.launch(trains_for_ever, np=2)
except KeyboardInterrupt:
    print("interrupted", *os.listdir(started))
"""


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

        raising, interrupted = nbformat.v4.new_code_cell(RAISES), nbformat.v4.new_code_cell(INTERRUPTED)
        notebook.cells += [raising, interrupted]
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyError") as raised:
            client.execute_cell(raising, len(notebook.cells) - 2)
        assert "rank 1 of 2 raised" in str(raised.value)
        assert "no such column" in str(raised.value)
        assert "[kdist] rank" not in said(raising)  # once, by the exception

        client.execute_cell(interrupted, len(notebook.cells) - 1)
    word, *ranks = said(interrupted).splitlines()[-1].split()
    assert word == "interrupted"
    assert len(ranks) == 2
    limit = time.monotonic() + 5
    while (left := [rank for rank in ranks if Path("/proc", rank).exists()]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left


def test_what_is_no_function_is_refused():
    with pytest.raises(LaunchError, match=r"(?s)Received: 3\. .*without parentheses"):
        kdist.launch(3)


def test_what_cannot_be_sent_is_refused():
    generator = (each for each in [1])
    with pytest.raises(LaunchError, match=r"(?s)cannot be sent to the ranks.*inside of the function"):
        kdist.launch(lambda: next(generator))


@pytest.mark.parametrize("wrong", [0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(wrong):
    with pytest.raises(LaunchError, match="no positive integer"):
        kdist.launch(print, np=wrong)
