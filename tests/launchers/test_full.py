"""The table of the ways to start a training: it is whole, says what is missing, and a way that does not train fails."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kdist.launchers import mpirun
from tests.helpers import slurm, spmd
from tests.launchers import full, ways
from tests.launchers.ways import WAYS, Way

RESULTS = Path(__file__).parent / "results.md"


def way(name: str) -> Way:
    (found,) = (each for each in WAYS if each.name == name)
    return found


def test_the_committed_table_has_each_way_and_all_passed() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `([^|]+)` \| (\w+) \| [^|]* \| ([^|]+) \|$", RESULTS.read_text(), re.MULTILINE)
    assert rows == [(each.name, each.command, each.engine, full.PASSED) for each in WAYS]


def test_readme_names_each_command() -> None:
    readme = (spmd.ROOT / "README.md").read_text()
    assert "tests/launchers/results.md" in readme
    for word in ("kdist run -np", "mpirun -np", "srun", "horovodrun -np", "--strategy collective", "--rendezvous"):
        assert word in readme
        assert any(word in each.command for each in WAYS)


def test_a_way_trains_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    assert full.main(["--ways", "rendezvous", "--out", str(out)]) == 0
    assert re.search(r"\| rendezvous \| .* \| collective \|  \| passed \|", out.read_text())


def test_what_is_not_here_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDIST_TEST_MPICH_PYTHON", raising=False)
    monkeypatch.setattr(slurm, "missing", lambda: "srun not found")
    said = {name: full.tried(way(name), {}, []) for name in ("MPICH, mpirun", "Slurm, none")}
    assert said == {
        "MPICH, mpirun": (("", "not here: KDIST_TEST_MPICH_PYTHON names no environment with MPICH"), ""),
        "Slurm, none": (("", "not here: srun not found"), ""),
    }


def test_the_mpirun_of_another_mpi_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find", lambda python, path: mpirun.MPIRun("mpirun", "mpich", "5.0"))
    (_, outcome), error = full.tried(way("Open MPI, mpirun"), {}, [])
    assert (outcome, error) == ("not here: the mpirun beside Python is that of MPICH", "")


def _trains_alone(env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    return spmd.execute([sys.executable, *arguments], env=spmd.RANK_ENVIRONMENT, timeout=ways.TIMEOUT)


def _fails(env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    return spmd.Finished(3, "no such host", False, 0.0)


@pytest.mark.parametrize(("start", "said"), [(_trains_alone, "'size': 1"), (_fails, "exit code 3\nno such host")])
def test_a_way_that_does_not_train_together_fails(start: Any, said: str) -> None:
    outcome, error = full.tried(dataclasses.replace(way("rendezvous"), start=start), {}, [])
    assert outcome == ("", "failed")
    assert said in error
