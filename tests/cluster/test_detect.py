"""The table of launchers: their variables, their order, and contradictions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import TABLE, ClusterInfo, detect
from kdist.errors import ClusterError
from tests.cluster import environments as envs

TWO_WORKERS = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})}
ONE_WORKER = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        (envs.PREPARED_SHELL, ("none", 0, 1, 0, 1)),
        (envs.OPENMPI_5, ("openmpi", 1, 2, 1, 2)),
        (envs.OPENMPI_4, ("openmpi", 3, 4, 1, 2)),
        (envs.MPICH_5, ("mpich", 1, 2, 1, 2)),
        (envs.INTEL_MPI, ("intel_mpi", 2, 4, 0, 2)),
        (envs.MVAPICH_2, ("mvapich", 5, 8, 1, 4)),
        (envs.HOROVOD_GLOO, ("horovod", 2, 4, 0, 2)),
        (envs.HOROVOD_MPI, ("horovod", 1, 2, 1, 2)),
        # Settings of Open MPI that are also written by hand.
        ({**envs.OPENMPI_5, "OMPI_MCA_btl": "^openib", "OMPI_MCA_pml": "ob1"}, ("openmpi", 1, 2, 1, 2)),
        (envs.SLURM_BATCH, ("none", 0, 1, 0, 1)),
        (envs.SLURM_STEP, ("slurm", 4, 5, 1, 2)),
        (envs.TPU_VM, ("tpu", 0, 1, 0, 1)),
        (TWO_WORKERS, ("tf_config", 1, 2, 0, 1)),
        (envs.KUBEFLOW, ("tf_config", 2, 3, 0, 1)),
        (envs.SAGEMAKER, ("tf_config", 1, 2, 0, 1)),
        (envs.VERTEX_AI, ("tf_config", 0, 2, 0, 1)),
        (envs.SLURM_PMIX, ("slurm", 4, 5, 1, 2)),
        (envs.SLURM_PMI2, ("slurm", 4, 5, 1, 2)),
        # Four ranks on a TPU's host train together; the TPU is ignored, and the reason mentions it.
        ({**envs.OPENMPI_4, "TPU_NAME": "my-tpu"}, ("openmpi", 3, 4, 1, 2)),
        # A launcher inside a Slurm step, whose own variables are those of the launcher's daemon.
        ({**envs.SLURM_STEP, **envs.OPENMPI_5}, ("openmpi", 1, 2, 1, 2)),
        ({**envs.SLURM_STEP, **envs.MPICH_5}, ("mpich", 1, 2, 1, 2)),
        # srun with a PMI plugin: the rank on the host is in Slurm's own variables.
        ({**envs.SLURM_STEP, "PMI_RANK": "4", "PMI_SIZE": "5", "PMIX_RANK": "4"}, ("slurm", 4, 5, 1, 2)),
        ({**envs.TPU_VM, **envs.OPENMPI_5}, ("openmpi", 1, 2, 1, 2)),
        ({**ONE_WORKER, **envs.OPENMPI_5}, ("openmpi", 1, 2, 1, 2)),
        # `kdist run --strategy collective` in a batch script.
        ({**envs.SLURM_BATCH, **TWO_WORKERS}, ("tf_config", 1, 2, 0, 1)),
        # A shell started by `srun --pty`, and a TF_CONFIG on purpose.
        (
            {**envs.SLURM_STEP, **TWO_WORKERS, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"},
            ("tf_config", 1, 2, 0, 1),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpich", 0, 1, 0, 1)),
    ],
)
def test_detect(env, expected):
    info = detect(env)
    assert (info.launcher, info.rank, info.size, info.local_rank, info.local_size) == expected
    # Every row is accounted for: the one that decided, and why the others did not.
    assert {name for name, _ in info.rejected} == {row.launcher for row in TABLE} - {info.launcher}


def test_reasons_quote_the_variables():
    assert "OMPI_COMM_WORLD_RANK=1" in detect(envs.OPENMPI_5).reason
    assert "single task of TF_CONFIG" in detect({**ONE_WORKER, **envs.OPENMPI_5}).reason
    assert detect({**envs.OPENMPI_4, "TPU_NAME": "my-tpu"}).reason.endswith("; the TPU was ignored")
    assert "ignored" not in detect(envs.OPENMPI_5).reason
    assert dict(detect(envs.SLURM_BATCH).rejected)["slurm"].startswith("a Slurm job, but not a step")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**envs.OPENMPI_5, "OMPI_COMM_WORLD_RANK": "two"}, ["OMPI_COMM_WORLD_RANK='two'", "from 0", "Fix:"]),
        ({**envs.OPENMPI_5, "OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_RANK='2'", "below OMPI_COMM_WORLD_SIZE"]),
        ({**envs.OPENMPI_5, "OMPI_COMM_WORLD_SIZE": "0"}, ["OMPI_COMM_WORLD_SIZE='0'", "from 1"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set", "Fix:"]),
        ({"PMIX_RANK": "1"}, ["PMIX_RANK='1'", "mpirun"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["PMI_SIZE=2", "MPI_LOCALRANKID"]),
        ({**envs.HOROVOD_GLOO, "HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC='1'", "elastic", "horovodrun -np"]),
        ({**envs.SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "3,"}, ["SLURM_STEP_TASKS_PER_NODE='3,'", "2(x3),1"]),
        ({**envs.SLURM_STEP, "SLURM_PROCID": "-1"}, ["SLURM_PROCID='-1'"]),
        ({**envs.OPENMPI_5, **TWO_WORKERS}, ["openmpi", "OMPI_COMM_WORLD_SIZE=2", "TF_CONFIG", "contradict"]),
        ({**envs.SLURM_STEP, **TWO_WORKERS}, ["slurm", "TF_CONFIG", "contradict"]),
        ({**envs.HOROVOD_GLOO, **envs.OPENMPI_5}, ["HOROVOD_SIZE=4", "OMPI_COMM_WORLD_SIZE=2", "contradict"]),
        ({**envs.OPENMPI_5, **envs.MPICH_5, "PMI_RANK": "0"}, ["openmpi", "mpich", "contradict"]),
    ],
)
def test_refused_with_a_fix(env, words):
    with pytest.raises(ClusterError) as caught:
        detect(env)
    for word in [*words, "Expected", "Fix:"]:
        assert word in str(caught.value)


NUMBERS = st.sampled_from(["0", "1", "2", "3", "4", "", "-1", " 1", "1_0", "x", "²", "9" * 40])
NAMES = sorted(
    {*envs.OPENMPI_5, *envs.MPICH_5, *envs.MVAPICH_2, *envs.HOROVOD_GLOO, *envs.SLURM_STEP, *envs.TPU_VM}
    | {"HOROVOD_ELASTIC", "I_MPI_ROOT", "MVP_COMM_WORLD_RANK", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "TPU_NAME"}
)
JOBS = st.dictionaries(
    st.sampled_from(["chief", "master", "worker", "ps", "evaluator", "cook"]),
    st.one_of(
        st.lists(st.sampled_from(["a:1", "a:2", "b:1", "b:2", "c", ":9"]), max_size=3), st.text(max_size=2), st.none()
    ),
)
TASK = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["chief", "master", "worker", "ps", "evaluator", None, 3, ["worker"]]),
        "index": st.sampled_from([0, 1, 2, -1, "0", "1", "x", None, True, 1.0, 10**30]),
    },
)
TF_CONFIGS = st.one_of(
    st.fixed_dictionaries({}, optional={"cluster": st.one_of(JOBS, st.text(max_size=2)), "task": TASK}).map(json.dumps),
    st.text(max_size=8),
)
STEPS = st.sampled_from(["1", "2", "2(x2)", "3,2", "(x2)", "0", "2(x", "²"])


@given(
    base=st.sampled_from([{}, envs.OPENMPI_5, envs.MPICH_5, envs.MVAPICH_2, envs.HOROVOD_GLOO, envs.SLURM_STEP]),
    changes=st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=6),
    tf_config=st.none() | TF_CONFIGS,
    per_node=st.none() | STEPS,
)
def test_any_mapping_is_detected_or_refused(base, changes, tf_config, per_node):
    env = {**base, **changes}
    if tf_config is not None:
        env["TF_CONFIG"] = tf_config
    if per_node is not None:
        env["SLURM_STEP_TASKS_PER_NODE"] = per_node
    before = dict(env)
    try:
        info = detect(env)
    except ClusterError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "Expected" in message
        assert "Fix:" in message
        return
    assert env == before
    assert isinstance(info, ClusterInfo)
    assert 0 <= info.rank < info.size
    assert 0 <= info.local_rank < info.local_size <= info.size
    assert info.reason
    assert len(info.rejected) == len(TABLE) - (info.launcher != "none")
