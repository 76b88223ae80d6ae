"""A task without heartbeats while the chief's main thread waits in TensorFlow: the job ends, and only then."""

import sys

import pytest

from tests.helpers import spmd

LIMIT = 60.0  # seconds; a generous guard

# A task that is stopped, and one that is not; a main thread that goes on, and one that does not. No TensorFlow here.
SCRIPT = """
import threading, time
from kdist.launchers.hosts.ports import free_ports
from kdist.parameter_server import connection, failure_detector
from kdist.parameter_server.connection import ChiefConnection
from kdist.parameter_server.membership import Membership
connection._HEARTBEAT_INTERVAL = failure_detector._INTERVAL = 0.1
failure_detector._GRACE = 0.5
chief, worker, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
membership = Membership(cluster, 30)
tasks = {job: ChiefConnection(cluster, job, 0, 30) for job in ("worker", "ps")}
membership.wait_for_all()
threading.Thread(target=tasks["worker"].wait, daemon=True).start()
with failure_detector.failure_detection(membership, 1.0, time.monotonic_ns):
    time.sleep(3)
print("makes progress", flush=True)
with failure_detector.failure_detection(membership, 1.0, lambda: 0):
    time.sleep(1)
time.sleep(2)
print("not watched", flush=True)
with failure_detector.failure_detection(membership, 1.0, lambda: 0):
    time.sleep(30)
print("not ended", flush=True)
"""


@pytest.mark.timeout(2 * LIMIT)
def test_missing_heartbeats_end_the_job_where_the_main_thread_makes_no_progress():
    done = spmd.execute([sys.executable, "-c", SCRIPT], env=spmd.RANK_ENVIRONMENT, timeout=LIMIT)
    assert done.returncode == 1, done.output
    assert "makes progress" in done.output
    assert "not watched" in done.output
    assert "ends the job: no heartbeat from ps 0 for 1 s" in done.output  # and not the worker, which sends them
    assert "not ended" not in done.output
