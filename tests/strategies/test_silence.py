"""A task that says nothing while the chief's main thread is in TensorFlow: the job ends, and only then."""

import sys

import pytest

from tests.helpers import spmd

LIMIT = 60.0  # seconds; a generous guard

# A task that is stopped, and one that is not; a main thread that goes on, and one that does not. No TensorFlow here.
SCRIPT = """
import threading, time
from kdist.launch.ports import free_ports
from kdist.strategies import attendance, silence
from kdist.strategies.attendance import Attendance, Line
attendance._BEAT = silence._TICK = 0.1
silence._GRACE = 0.5
chief, worker, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
listening = Attendance(cluster, 30)
lines = {job: Line(cluster, job, 0, 30) for job in ("worker", "ps")}
listening.wait_for_all()
speaking = threading.Thread(target=lines["worker"].wait, daemon=True)
speaking.start()
with silence.silence_ends_the_job(listening, 1.0, time.monotonic_ns):
    time.sleep(3)
print("goes on", flush=True)
with silence.silence_ends_the_job(listening, 1.0, lambda: 0):
    time.sleep(1)
time.sleep(2)
print("not watched", flush=True)
with silence.silence_ends_the_job(listening, 1.0, lambda: 0):
    time.sleep(30)
print("not ended", flush=True)
"""


@pytest.mark.timeout(2 * LIMIT)
def test_silence_ends_the_job_where_the_main_thread_does_not_go_on():
    done = spmd.execute([sys.executable, "-c", SCRIPT], env=spmd.RANK_ENVIRONMENT, timeout=LIMIT)
    assert done.returncode == 1, done.output
    assert "goes on" in done.output
    assert "not watched" in done.output
    assert "ends the job: ps 0 said nothing for 1 s" in done.output  # and not the worker, which says so
    assert "not ended" not in done.output
