"""What kdist sets while Open MPI starts, and the choices of the user's that it keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdist.cluster.open_mpi import chosen_in, with_defaults, without_unused_transport

BTL = "OMPI_MCA_btl"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("OMPI_MCA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPAL_PREFIX", str(tmp_path / "prefix"))


def test_the_unused_transport_is_left_out_while_mpi_starts_only() -> None:
    with without_unused_transport():
        assert os.environ[BTL] == "^ofi"
    assert BTL not in os.environ


CHOSEN = [("^openib", "^openib,ofi"), ("^ofi,uct", "^ofi,uct"), ("self,tcp", "self,tcp")]


@pytest.mark.parametrize(("given", "used"), CHOSEN)
def test_transports_that_the_user_has_chosen_stay(given: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BTL, given)
    with without_unused_transport():
        assert os.environ[BTL] == used
    assert os.environ[BTL] == given


@pytest.mark.parametrize("place", [".openmpi/mca-params.conf", "prefix/etc/openmpi-mca-params.conf"])
def test_a_choice_in_a_file_of_parameters_stays(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text("# btl = vader\nmpi_yield_when_idle = 1\nbtl_tcp_if_include = eth0\n  btl = self,tcp  # no sm\n")
    with without_unused_transport():
        assert BTL not in os.environ
    file.write_text("btl = ^uct\n")
    with without_unused_transport():
        assert os.environ[BTL] == "^uct,ofi"
    assert BTL not in os.environ


def test_other_files_of_parameters_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_mca_base_param_files", "site.conf")
    with without_unused_transport():
        assert BTL not in os.environ


def test_the_first_file_that_chooses_counts(tmp_path: Path) -> None:
    for number, text in enumerate(["", "btl = tcp,self\nbtl = sm,self\n", "btl = ^ofi\n"]):
        (tmp_path / str(number)).write_text(text)
    assert chosen_in(tmp_path / name for name in ("missing", "0", "1", "2")) == "sm,self"
    assert chosen_in([tmp_path / "0"]) is None


def test_defaults_leave_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_ONE", "theirs")
    monkeypatch.delenv("KDIST_OTHER", raising=False)
    with with_defaults({"KDIST_ONE": "ours", "KDIST_OTHER": "ours"}):
        assert (os.environ["KDIST_ONE"], os.environ["KDIST_OTHER"]) == ("theirs", "ours")
    assert os.environ["KDIST_ONE"] == "theirs"
    assert "KDIST_OTHER" not in os.environ
