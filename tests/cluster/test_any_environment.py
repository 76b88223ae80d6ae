"""Any variables, hosts and `TF_CONFIG`: a result, or an error with a fix."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.errors import KDistError
from kdist.launchers.hosts.host import parse_hostfile, parse_hosts
from kdist.strategies.selection import WORDS, choose

NUMBERS = [
    f"{prefix}_{name}"
    for prefix, names in {
        "OMPI_COMM_WORLD": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        "PMI": ("RANK", "SIZE"),
        "MPI": ("LOCALRANKID", "LOCALNRANKS"),
        "HOROVOD": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        "SLURM": ("PROCID", "STEP_ID", "STEP_NUM_TASKS", "NTASKS", "LOCALID"),
        "MV2_COMM_WORLD": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    }.items()
    for name in names
]
OTHERS = ["TPU_NAME", "I_MPI_ROOT", "HOROVOD_ELASTIC", "HOROVOD_CONTROLLER", "SLURM_STEP_TASKS_PER_NODE", "PMI_FD"]

texts = st.one_of(st.integers(-2, 5).map(str), st.text(max_size=8), st.just(""))
environments = st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, 4).map(str)).flatmap(
    lambda right: st.dictionaries(st.sampled_from(NUMBERS + OTHERS), texts, max_size=3).map(lambda odd: right | odd)
)

anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
addresses = st.lists(st.one_of(st.just("a:1"), st.just("b:2"), st.just("b:x"), st.text(max_size=5)), max_size=3)
jobs = st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator", "master", "x"]), addresses, max_size=4)
tasks = st.fixed_dictionaries(
    {}, optional={"type": st.one_of(st.sampled_from(["worker", "ps", "chief"]), anything), "index": anything}
)
configs = st.one_of(
    anything,
    st.fixed_dictionaries(
        {}, optional={"cluster": st.one_of(jobs, anything), "task": st.one_of(tasks, anything), "environment": anything}
    ),
)


def result_of(function, *arguments):
    """Returns the result, or `None` after an error of kdist that has all its parts."""
    try:
        return function(*arguments)
    except KDistError as error:
        message = str(error)
    assert all(word in message for word in ("Received", "Expected", "Fix: ")), message
    return None


@given(environments)
@settings(max_examples=400)
def test_any_environment(env):
    info = result_of(detect, env)
    if info is not None:
        assert 0 <= info.rank < info.size
        assert 0 <= info.local_rank < info.local_size
        for word in WORDS:
            result_of(choose, word, info)


@given(st.one_of(st.text(max_size=30), configs.map(json.dumps)))
@settings(max_examples=400)
def test_any_tf_config(text):
    info = result_of(detect, {"TF_CONFIG": text})
    assert info is None or isinstance(info, ClusterInfo)


@given(st.one_of(st.text(max_size=20), st.lists(st.from_regex(r"[ab.\[\]:0-9-]{0,6}"), max_size=3).map(",".join)))
@settings(max_examples=300)
def test_any_list_of_hosts(text):
    hosts = result_of(parse_hosts, text)
    assert hosts is None or all(host.name and host.slots > 0 for host in hosts)


@given(
    st.one_of(
        st.text(max_size=40), st.lists(st.from_regex(r"[ab] ?(slots)?[=: ]?-?\d?#?", fullmatch=True)).map("\n".join)
    )
)
@settings(max_examples=300)
def test_any_hostfile(text):
    hosts = result_of(parse_hostfile, text, "hosts")
    assert hosts is None or all(host.name and host.slots > 0 for host in hosts)
