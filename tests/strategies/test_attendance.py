"""Lines between the chief and its servers, over real sockets: who is there, who is lost, and how the chief ends."""

import contextlib
import socket
import threading
import time

import pytest

from kdist.errors import ClusterError, ClusterLostError
from kdist.launch.ports import free_ports
from kdist.strategies.attendance import Attendance, Line

SOON = 10.0  # seconds; a generous guard


def cluster_of(workers=1):
    chief, ps, *others = (f"127.0.0.1:{port}" for port in free_ports(2 + workers))
    return {"chief": [chief], "worker": others, "ps": [ps]}


@pytest.fixture
def attendance():
    with contextlib.ExitStack() as stack:

        def make(cluster, timeout=SOON):
            made = Attendance(cluster, timeout)
            stack.callback(made.dismiss, well=True)
            return made

        yield make


def until_raised(check):
    """Calls a function until it raises; returns what it raised."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            check()
        except ClusterLostError as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("nothing was raised")


def until(condition):
    """Waits for something that happens in another thread."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def outcome(line):
    """Waits for the chief's end in a thread; returns what `wait` raised, or `None`."""
    found = []

    def wait():
        try:
            line.wait()
            found.append(None)
        except ClusterLostError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return lambda: (thread.join(SOON), found[0])[1]


@pytest.mark.parametrize("well", [True, False])
def test_servers_learn_how_the_chief_ends(attendance, well):
    cluster = cluster_of()
    chief = attendance(cluster)
    ends = [outcome(Line(cluster, job, 0, SOON)) for job in ("worker", "ps")]
    chief.wait_for_all()
    chief.check()
    chief.dismiss(well=well)
    said = [end() for end in ends]
    assert said == [None, None] if well else all("the chief failed" in each for each in said)


def test_a_line_that_breaks_means_that_the_chief_is_lost():
    cluster = cluster_of()
    host, port = cluster["chief"][0].split(":")
    with socket.create_server((host, int(port))) as listener:
        end = outcome(Line(cluster, "ps", 0, SOON))
        listener.accept()[0].close()
        assert "the line to the chief broke" in end()


def test_a_chief_that_does_not_appear_is_named():
    cluster = cluster_of()
    with pytest.raises(ClusterError, match=rf"chief 0 \({cluster['chief'][0]}\)"):
        Line(cluster, "worker", 0, 0.5)


def test_tasks_that_do_not_appear_are_named(attendance):
    cluster = cluster_of(workers=2)
    chief = attendance(cluster, timeout=1.0)
    present = Line(cluster, "worker", 1, SOON)
    with pytest.raises(ClusterError, match=r"nothing from worker 0 \(.*\), ps 0 \(.*\) for 1 s"):
        chief.wait_for_all()
    assert present is not None  # held to here: its line ends with it


def test_the_chief_waits_for_a_task_that_comes_late_and_for_no_evaluator(attendance):
    cluster = cluster_of()
    chief = attendance(cluster)
    waiting = threading.Thread(target=chief.wait_for_all, daemon=True)
    waiting.start()
    lines = [Line(cluster, job, 0, SOON) for job in ("ps", "evaluator")]
    waiting.join(0.5)
    assert waiting.is_alive()
    lines.append(Line(cluster, "worker", 0, SOON))
    waiting.join(SOON)
    assert not waiting.is_alive()
    lines[1]._socket.close()  # an evaluator that is lost is nobody's loss
    chief.wait_for_news()
    chief.check()


def test_an_evaluator_looks_whether_the_chief_is_done(attendance):
    cluster = cluster_of()
    chief = attendance(cluster)
    line = Line(cluster, "evaluator", 0, SOON)
    assert line.wait(0.1) is False
    until(lambda: "evaluator 0" in chief._lines)
    chief.dismiss(well=True)
    assert line.wait(SOON) is True
    assert line.wait(0.0) is True


def test_a_task_with_another_cluster_is_refused(attendance):
    cluster = cluster_of()
    chief = attendance(cluster)
    stranger = Line({**cluster, "worker": ["127.0.0.1:1"]}, "worker", 0, SOON)
    with pytest.raises(ClusterError, match="worker 0 has another cluster"):
        chief.wait_for_all()
    with pytest.raises(ClusterLostError):
        stranger.wait()


def test_what_speaks_another_language_is_no_task(attendance):
    cluster = cluster_of()
    chief = attendance(cluster, timeout=1.0)
    host, port = cluster["chief"][0].split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ClusterError, match="worker 0"):
            chief.wait_for_all()


def test_a_lost_ps_ends_training_at_once_and_a_lost_worker_does_not(attendance):
    cluster = cluster_of(workers=2)
    chief = attendance(cluster, timeout=1.0)
    lines = {name: Line(cluster, name[:-2], int(name[-1]), SOON) for name in ("worker 0", "worker 1", "ps 0")}
    chief.wait_for_all()
    lines["worker 0"]._socket.close()
    chief.wait_for_news()
    chief.check()
    lines["worker 0"] = Line(cluster, "worker", 0, SOON)
    lines["worker 1"]._socket.close()
    time.sleep(1.5)  # longer than the time limit for no worker at all
    chief.check()
    lines["ps 0"]._socket.close()
    assert "A ps is lost" in until_raised(chief.check)


def test_training_without_workers_ends_after_the_time_limit(attendance):
    cluster = cluster_of()
    chief = attendance(cluster, timeout=1.0)
    lines = [Line(cluster, job, 0, SOON) for job in ("worker", "ps")]
    chief.wait_for_all()
    lines[0]._socket.close()
    chief.wait_for_news()
    chief.check()
    assert "No worker is left" in until_raised(chief.check)


def test_a_port_in_use_is_named():
    cluster = cluster_of()
    host, port = cluster["chief"][0].split(":")
    with socket.create_server((host, int(port))), pytest.raises(ClusterError, match="chief 0 at .*Fix: "):
        Attendance(cluster, SOON)


def test_a_ps_that_was_lost_is_not_there_again(attendance):
    """What it held of the model is gone; and who waits for it in TensorFlow is to hear that it says nothing."""
    cluster = cluster_of()
    chief = attendance(cluster)
    lines = {job: Line(cluster, job, 0, SOON) for job in ("worker", "ps")}
    chief.wait_for_all()
    lines["ps"]._socket.close()
    assert "ps 0" in until_raised(chief.check)
    assert set(chief.heard()) == {"worker 0", "ps 0"}
    lines["ps"] = Line(cluster, "ps", 0, SOON)
    until(lambda: "ps 0" in chief._lines)
    assert "ps 0" in until_raised(chief.check)
