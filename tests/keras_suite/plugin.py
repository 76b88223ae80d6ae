"""A plugin of pytest for the ranks of `python -m tests.keras_suite`: each test of Keras in the scope.

`KERAS_SUITE` names a file of JSON: the tests to run (`tests`), how many ranks there are (`ranks`; more than one run in
the scope), and where this rank writes what came of them, in lines (`out`, in which `{rank}` stands for the rank).

A test that fails on any rank ends the job: the next one would meet the messages that it has left.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REQUEST: dict[str, Any] = json.loads(Path(os.environ["KERAS_SUITE"]).read_text())
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

GRACE, PATIENCE = 3.0, 120.0  # seconds that a rank waits for the others to end a test, if one has failed or if none has
TAIL = 16384  # bytes of a rank's lines that hold those of its last test


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that were asked for; all by default. Notes what there is to run."""
    if REQUEST["tests"] is not None:
        asked = set(REQUEST["tests"])
        items[:] = [item for item in items if item.nodeid in asked]
    for item in items:
        _write({"test": item.nodeid, "when": "collected"})


@pytest.fixture(autouse=True)
def in_the_scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Opens the scope around a test, as a script would that splits its batches."""
    if REQUEST["ranks"] == 1:
        yield
        return
    from keras.src.testing import TestCase

    import kdist

    places = itertools.count()

    def get_temp_dir(self: Any) -> str:
        """Returns a directory that the ranks share, as on a cluster where a script names it."""
        # Tests of files write, list and delete them by themselves on each rank.
        of_rank = f"-{RANK}" if ".saving." in self.id() else ""
        place = Path(REQUEST["out"]).parent / f"{zlib.crc32(self.id().encode())}-{next(places)}{of_rank}"
        place.mkdir(exist_ok=True)
        return str(place)

    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda number=None: seed(7 if number is None else number))  # as users should
    monkeypatch.setattr(TestCase, "get_temp_dir", get_temp_dir)
    with kdist.scope(scale_batch=False, scale_lr=None, stall_timeout=60.0):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes which test runs, and goes on when it has passed on all ranks."""
    _write({"test": item.nodeid, "when": "begins"})
    result = yield
    _write({"test": item.nodeid, "when": "ends"})
    if REQUEST["ranks"] > 1 and not _passed_everywhere(item.nodeid):
        os._exit(1)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what came of a test."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
        _write({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "why": why})


def _passed_everywhere(test: str) -> bool:
    """Waits for the other ranks to end a test: for long only if none has failed in it."""
    started = time.monotonic()
    while True:
        lines = [line for rank in range(REQUEST["ranks"]) for line in _lines(rank) if line["test"] == test]
        failed = any(line.get("outcome") == "failed" for line in lines)
        if sum(line["when"] == "ends" for line in lines) == REQUEST["ranks"]:
            return not failed
        if time.monotonic() - started > (GRACE if failed else PATIENCE):
            return False
        time.sleep(0.01)


def _lines(rank: int) -> list[dict[str, Any]]:
    """Returns the last lines that a rank has written whole."""
    path = _path(rank)
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        tail = file.read().decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in tail if line.startswith('{"test"') and line.endswith("}\n")]


def _path(rank: int) -> Path:
    return Path(REQUEST["out"].replace("{rank}", str(rank)))


def _write(line: dict[str, Any]) -> None:
    with _path(RANK).open("a") as file:
        file.write(json.dumps(line) + "\n")
