"""A TF_CONFIG without a task that training with parameter servers needs is refused before anything connects."""

import json

import pytest

from kdist.cluster.tf_config import tf_config
from kdist.errors import ClusterError
from kdist.parameter_server.roles import find_role
from kdist.strategies.options import ParameterServer


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_a_cluster_without_a_task_is_refused(missing):
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    del cluster[missing]
    task = {"type": [job for job in cluster if job != "chief"][-1], "index": 0}  # the chief would hide its GPUs
    info = tf_config({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    with pytest.raises(ClusterError, match=f"Fix: add {missing} to TF_CONFIG's cluster, on every task"):
        find_role(info, ParameterServer(), lambda: pytest.fail("MPI is not needed"))
