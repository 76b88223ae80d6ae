"""Which strategy a job gets."""

from __future__ import annotations

import pytest

from kdist.cluster.info import ClusterInfo
from kdist.errors import StrategyError
from kdist.strategies.choice import MPI_LAUNCHERS, choose


@pytest.mark.parametrize("word", ["auto", "mpi"])
@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_an_mpi_launcher_train_over_mpi(word: str, launcher: str) -> None:
    assert choose(word, ClusterInfo(launcher=launcher, size=4)).strategy == "mpi"


@pytest.mark.parametrize("launcher", ["none", *MPI_LAUNCHERS])
def test_one_process_is_keras_own(launcher: str) -> None:
    assert choose("auto", ClusterInfo(launcher=launcher)).strategy == "single"


def test_single_under_many_ranks_is_many_trainings() -> None:
    assert "for itself" in choose("single", ClusterInfo(launcher="openmpi", size=4)).why


@pytest.mark.parametrize("info", [ClusterInfo(launcher="horovod", size=2), ClusterInfo(launcher="tf_config", size=3)])
def test_a_job_that_is_not_served_is_refused(info: ClusterInfo) -> None:
    with pytest.raises(StrategyError, match=rf"{info.size} process\(es\) of {info.launcher}.*Fix: "):
        choose("auto", info)


def test_a_tpu_is_not_silently_left_alone() -> None:
    with pytest.raises(StrategyError, match="tpu"):
        choose("auto", ClusterInfo(launcher="tpu", tpu_name="local"))
    assert choose("single", ClusterInfo(launcher="tpu", tpu_name="local")).strategy == "single"


def test_an_unknown_word_lists_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="Received: strategy='mip'. Expected one of 'auto', 'single', 'mpi'"):
        choose("mip", ClusterInfo())
    with pytest.raises(StrategyError, match="planned, but not in this version"):
        choose("horovod", ClusterInfo())
