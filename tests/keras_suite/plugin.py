"""A plugin of pytest for the ranks of `python -m tests.keras_suite`: each test of Keras in the scope.

`KERAS_SUITE` names a file of JSON: the tests to run (`tests`), whether in the scope (`scoped`), and where this rank
writes what came of them, a line a test (`out`, in which `{rank}` stands for the rank).
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REQUEST: dict[str, Any] = json.loads(Path(os.environ["KERAS_SUITE"]).read_text())
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that were asked for; all by default."""
    if REQUEST["tests"] is not None:
        asked = set(REQUEST["tests"])
        items[:] = [item for item in items if item.nodeid in asked]


@pytest.fixture(autouse=True)
def in_the_scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Opens the scope around a test, as a script would that splits its batches."""
    if not REQUEST["scoped"]:
        yield
        return
    from keras.src.testing import TestCase

    import kdist

    places = itertools.count()

    def get_temp_dir(self: Any) -> str:
        """Returns a directory that the ranks share, as on a cluster: a script names it."""
        place = Path(REQUEST["out"]).parent / f"{zlib.crc32(self.id().encode())}-{next(places)}"
        place.mkdir(exist_ok=True)
        return str(place)

    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda number=None: seed(7 if number is None else number))  # as users should
    monkeypatch.setattr(TestCase, "get_temp_dir", get_temp_dir)
    with kdist.scope(scale_batch=False, scale_lr=None, stall_timeout=60.0):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes which test runs: if the job ends, that is the last line."""
    _write({"test": item.nodeid, "when": "begins"})
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what came of a test."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
        _write({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "why": why})


def _write(line: dict[str, Any]) -> None:
    with Path(REQUEST["out"].replace("{rank}", RANK)).open("a") as file:
        file.write(json.dumps(line) + "\n")
