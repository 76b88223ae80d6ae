"""TF_CONFIG: the order of ranks, and the refusal of invalid values."""

import json

import pytest

from kdist.cluster.tf_config import tf_config
from kdist.errors import ClusterError


def env(cluster, task_type="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})}


def test_chief_comes_first_then_workers():
    cluster = {"worker": ["a:2", "b:1"], "chief": ["a:1"]}
    places = [tf_config(env(cluster, job, index)) for job, index in [("chief", 0), ("worker", 0), ("worker", 1)]]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in places] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_a_master_is_a_chief():
    info = tf_config(env({"master": ["a:1"], "worker": ["b:1"]}, "master"))
    assert (info.task_type, info.rank, info.cluster_spec) == ("chief", 0, {"chief": ("a:1",), "worker": ("b:1",)})


def test_evaluators_are_not_counted():
    cluster = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}
    assert tf_config(env(cluster)).size == 2
    assert (tf_config(env(cluster, "evaluator")).size, tf_config(env(cluster, "evaluator")).rank) == (1, 0)
    assert tf_config(env({"worker": ["a:1"]}, "evaluator")).task_type == "evaluator"
    assert not tf_config(env(cluster, "evaluator")).is_chief


def test_parameter_servers_are_recorded():
    info = tf_config(env({"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}, "ps"))
    assert (info.task_type, info.task_index, info.rank, info.size) == ("ps", 0, 2, 3)
    assert info.cluster_spec["ps"] == ("a:3",)


def test_an_index_may_be_a_string():
    assert tf_config(env({"worker": ["a:1", "b:1"]}, index="1")).rank == 1


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_no_cluster_is_no_launch(text):
    assert isinstance(tf_config({"TF_CONFIG": text}), str)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"cluster": ["a:1"], "task": {}}, "its cluster is"),
        ({"cluster": {"worker": "a:1"}}, "'worker' is 'a:1'"),
        ({"cluster": {"worker": ["a"]}}, "host:port"),
        ({"cluster": {"worker": ["a:x"]}}, "host:port"),
        ({"cluster": {"cook": ["a:1"]}}, "a job 'cook'"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "more than one task has the address a:1"),
        ({"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}, "more than one task has the address a:1"),
        ({"cluster": {"master": ["a:1"], "chief": ["b:1"]}}, "both a chief and a master"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "2 chiefs"),
        ({"cluster": {"ps": ["a:1"]}}, "neither a chief nor a worker"),
        ({"cluster": {"worker": ["a:1"]}}, "its task is None"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "type 'ps'"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}, "index 1"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": True}}, "index True"),
    ],
)
def test_refused_with_a_fix(value, words):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ClusterError) as caught:
        tf_config({"TF_CONFIG": text})
    for word in ["TF_CONFIG is invalid", "Received: TF_CONFIG=", words, "Expected", "Fix:"]:
        assert word in str(caught.value)
