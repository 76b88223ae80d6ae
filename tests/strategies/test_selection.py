"""The selection of a strategy."""

from __future__ import annotations

import json

import pytest

from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.cluster.slurm import has_pmi
from kdist.errors import StrategyError
from kdist.restarts.events import own_reports
from kdist.strategies.selection import MPI_LAUNCHERS, Resources, Selection, agreed, choose
from tests.cluster import environments


def tf_config(job: str, *jobs: str) -> dict[str, str]:
    cluster = {each: [f"{each}0:1", f"{each}1:1"][: 1 + (each == "worker")] for each in jobs}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})}


WORKERS, SERVERS = ("worker",), ("chief", "worker", "ps")

# What a script gets from the environment alone, with the GPUs that each process sees.
AUTO = [
    ({}, 0, "single"),
    ({}, 1, "single"),
    ({}, 4, "mirrored"),
    (environments.PREPARED_SHELL, 0, "single"),
    (environments.OPENMPI_4, 0, "mpi"),
    (environments.OPENMPI_5, 0, "mpi"),
    (environments.OPENMPI_5, 1, "collective"),
    (environments.MPICH_5, 0, "mpi"),
    (environments.INTEL_MPI, 0, "mpi"),
    (environments.MVAPICH_2, 0, "mpi"),
    (environments.HOROVOD_GLOO, 0, "horovod"),
    (environments.HOROVOD_GLOO, 1, "horovod"),
    (environments.SLURM_STEP, 0, "mpi"),
    (environments.SLURM_PMIX, 0, "mpi"),
    (environments.SLURM_PMI2, 0, "mpi"),
    (environments.SLURM_BATCH, 0, "single"),
    (environments.KUBEFLOW, 0, "collective"),
    (environments.SAGEMAKER, 0, "collective"),
    (environments.VERTEX_AI, 0, "collective"),
    (tf_config("worker", *WORKERS), 0, "collective"),
    (tf_config("chief", *SERVERS), 0, "parameter_server"),
    (tf_config("ps", *SERVERS), 0, "parameter_server"),
    (tf_config("evaluator", *SERVERS), 0, "parameter_server"),
    ({"TPU_NAME": "local"}, 0, "tpu"),
]


@pytest.mark.parametrize(("env", "num_gpus", "strategy"), AUTO)
def test_an_environment_decides(env: dict[str, str], num_gpus: int, strategy: str) -> None:
    assert choose("auto", detect(env), Resources(num_gpus=num_gpus)).strategy == strategy


@pytest.mark.parametrize(("running", "started"), [(None, "TF_CONFIG"), ("directory", "kdist")])
def test_a_cluster_that_kdist_run_has_made_is_told_from_that_of_a_service(monkeypatch, running, started) -> None:
    monkeypatch.setattr(own_reports, "running", running)
    assert choose("auto", detect(tf_config("worker", *WORKERS))).why == f"started by {started}"


def test_an_evaluator_without_parameter_servers_is_refused() -> None:
    info = detect(tf_config("evaluator", *WORKERS))
    for word in ("auto", "collective", "mirrored"):
        with pytest.raises(StrategyError, match="evaluator.*leave it out"):
            choose(word, info)
    assert choose("single", info).strategy == "single"


@pytest.mark.parametrize("word", ["auto", "mpi"])
@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_an_mpi_launcher_train_over_mpi(word: str, launcher: str) -> None:
    assert choose(word, ClusterInfo(launcher=launcher, size=4)).strategy == "mpi"


@pytest.mark.parametrize("launcher", ["none", *MPI_LAUNCHERS])
def test_one_process_is_keras_own(launcher: str) -> None:
    assert choose("auto", ClusterInfo(launcher=launcher)).strategy == "single"


@pytest.mark.parametrize(("num_gpus", "horovod_on_gpus"), [(0, False), (1, False), (1, True)])
def test_ranks_that_no_mpi_connects_train_over_tensorflows_collectives(num_gpus: int, horovod_on_gpus: bool) -> None:
    info = detect(environments.SLURM_STEP)
    chosen = choose("auto", info, Resources(num_gpus=num_gpus, horovod_on_gpus=horovod_on_gpus, has_mpi=False))
    assert chosen.strategy == "collective"
    assert "started by Slurm without MPI" in chosen.why
    assert choose("mpi", info, Resources(has_mpi=False)).strategy == "mpi"  # the user may know better


@pytest.mark.parametrize(
    ("env", "has_mpi"),
    [
        (environments.SLURM_STEP, False),
        ({**environments.SLURM_STEP, "I_MPI_PMI_LIBRARY": "/usr/lib/libpmi.so"}, True),
        (environments.SLURM_PMIX, True),
        (environments.SLURM_PMI2, True),
    ],
)
def test_srun_tells_mpi_how_to_connect_or_does_not(env: dict[str, str], has_mpi: bool) -> None:
    assert has_pmi(env) == has_mpi


def test_single_under_several_ranks_is_independent_trainings() -> None:
    assert "trains independently" in choose("single", ClusterInfo(launcher="openmpi", size=4)).why


def test_horovodruns_ranks_train_over_horovod() -> None:
    assert choose("auto", ClusterInfo(launcher="horovod", size=2)).strategy == "horovod"


@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_an_mpi_launcher_train_over_horovod_if_asked_or_on_gpus(launcher: str) -> None:
    info = ClusterInfo(launcher=launcher, size=2)
    assert choose("horovod", info).strategy == "horovod"
    on_gpus = choose("auto", info, Resources(horovod_on_gpus=True))
    assert on_gpus.strategy == "horovod"
    assert "NCCL" in on_gpus.why
    assert choose("mpi", info, Resources(horovod_on_gpus=True)).strategy == "mpi"


@pytest.mark.parametrize(("word", "launcher"), [("mpi", "horovod"), ("mpi", "tf_config"), ("horovod", "tf_config")])
def test_a_strategy_that_does_not_support_the_launcher_is_refused(word: str, launcher: str) -> None:
    with pytest.raises(StrategyError, match=rf"{word}.*3 process\(es\) of {launcher}.*openmpi.*Fix: .*kdist run"):
        choose(word, ClusterInfo(launcher=launcher, size=3))


@pytest.mark.parametrize("word", ["auto", "horovod"])
def test_an_unsupported_launcher_is_refused(word: str) -> None:
    with pytest.raises(StrategyError, match=r"3 process\(es\) of none.*Fix: "):
        choose(word, ClusterInfo(size=3))


def test_a_tpu_is_selected_unless_single_is_given() -> None:
    assert choose("auto", ClusterInfo(launcher="tpu", tpu_name="local")).strategy == "tpu"
    assert choose("single", ClusterInfo(launcher="tpu", tpu_name="local")).strategy == "single"


def test_workers_of_tf_config_train_over_tensorflows_own_collectives() -> None:
    info = ClusterInfo(launcher="tf_config", size=3, cluster_spec={"chief": ("a:1",), "worker": ("b:1", "c:1")})
    assert choose("auto", info).strategy == "collective"
    assert choose("auto", ClusterInfo(launcher="tf_config")).strategy == "single"


@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_ranks_of_an_mpi_launcher_with_gpus_keep_gradients_on_them(launcher: str) -> None:
    info = ClusterInfo(launcher=launcher, size=2)
    on_gpus = choose("auto", info, Resources(num_gpus=1))
    assert on_gpus.strategy == "collective"
    assert "host memory" in on_gpus.why
    assert choose("auto", info, Resources(num_gpus=1, horovod_on_gpus=True)).strategy == "horovod"
    assert choose("mpi", info, Resources(num_gpus=1)).strategy == "mpi"
    shared = choose("auto", info, Resources(num_gpus=1, horovod_on_gpus=True, shares_gpus=True))
    assert shared.strategy == "mpi"
    assert "share GPUs" in shared.why
    assert choose("auto", info, Resources(num_gpus=1, shares_gpus=True, has_mpi=False)).strategy == "collective"


@pytest.mark.parametrize(("num_gpus", "strategy"), [(0, "single"), (1, "single"), (2, "mirrored")])
def test_several_gpus_of_one_process_are_mirrored(num_gpus: int, strategy: str) -> None:
    choice = choose("auto", ClusterInfo(), Resources(num_gpus=num_gpus))
    assert choice.strategy == strategy
    assert ("2 GPUs" in choice.why) == (num_gpus == 2)
    assert choose("single", ClusterInfo(), Resources(num_gpus=num_gpus)).strategy == "single"


@pytest.mark.parametrize("word", ["mirrored", "tpu"])
def test_a_strategy_of_one_process_is_refused_in_a_job_of_several(word: str) -> None:
    assert choose(word, ClusterInfo()).strategy == word
    with pytest.raises(StrategyError, match=rf"strategy='{word}' and 4 process.es. of openmpi.*Fix: "):
        choose(word, ClusterInfo(launcher="openmpi", size=4))


def test_an_unknown_word_lists_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="Received: strategy='mip'. Expected one of 'auto', 'single', 'mpi'"):
        choose("mip", ClusterInfo())


PS_CLUSTER = {"chief": ("a:1",), "worker": ("a:2",), "ps": ("a:3",)}


@pytest.mark.parametrize(
    ("word", "info"),
    [
        ("auto", ClusterInfo(launcher="tf_config", size=3, cluster_spec=PS_CLUSTER)),
        ("parameter_server", ClusterInfo(launcher="tf_config", size=3, cluster_spec=PS_CLUSTER)),
        ("parameter_server", ClusterInfo(launcher="openmpi", size=4)),
    ],
)
def test_parameter_servers_by_tf_config_or_by_rank(word: str, info: ClusterInfo) -> None:
    assert choose(word, info).strategy == "parameter_server"


@pytest.mark.parametrize(
    ("word", "is_synchronous"), [("collective", False), ("mpi", False), ("auto", True), ("collective", True)]
)
def test_an_all_reduce_in_a_cluster_with_parameter_servers_is_refused(word: str, is_synchronous: bool) -> None:
    with pytest.raises(StrategyError, match="Synchronous training has no parameter servers.*leave the ps out"):
        choose(word, detect(tf_config("worker", *SERVERS)), is_synchronous=is_synchronous)


def test_parameter_servers_in_one_process_are_keras_own_code() -> None:
    assert choose("parameter_server", ClusterInfo()).strategy == "single"


def test_parameter_servers_under_a_launcher_without_roles_are_refused() -> None:
    with pytest.raises(StrategyError, match="Fix: "):
        choose("parameter_server", ClusterInfo(launcher="horovod", size=4))


def test_ranks_of_nodes_that_differ_take_what_no_node_lacks():
    own = Selection("mpi", "started by Slurm")
    assert agreed(own, [("n0", "mpi"), ("n1", "mpi")]) is own
    taken = agreed(own, [("n0", "mpi"), ("n0", "mpi"), ("n1", "collective"), ("n2", "mpi")])
    assert taken.strategy == "collective"
    assert taken.why == "started by Slurm, whose nodes differ: mpi on n0, n2; collective on n1"
