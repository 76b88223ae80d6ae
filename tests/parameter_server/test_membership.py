"""Connections between the chief and the other tasks, over real sockets: joining, losses, and how the chief ends."""

import contextlib
import errno
import socket
import threading
import time

import pytest

from kdist.errors import ClusterError, ClusterLostError
from kdist.launchers.hosts.ports import free_ports
from kdist.parameter_server.connection import JOINED, ChiefConnection
from kdist.parameter_server.membership import Membership

SOON = 10.0  # seconds; a generous guard


def cluster_of(workers=1):
    chief, ps, *others = (f"127.0.0.1:{port}" for port in free_ports(2 + workers))
    return {"chief": [chief], "worker": others, "ps": [ps]}


@pytest.fixture
def membership():
    with contextlib.ExitStack() as stack:

        def make(cluster, timeout=SOON):
            made = Membership(cluster, timeout)
            stack.callback(made.close, success=True)
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


def outcome(connection):
    """Waits for the chief's end in a thread; returns what `wait` raised, or `None`."""
    found = []

    def wait():
        try:
            connection.wait()
            found.append(None)
        except ClusterLostError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return lambda: (thread.join(SOON), found[0])[1]


@pytest.mark.parametrize("success", [True, False])
def test_tasks_learn_how_the_chief_ends(membership, success):
    cluster = cluster_of()
    chief = membership(cluster)
    ends = [outcome(ChiefConnection(cluster, job, 0, SOON)) for job in ("worker", "ps")]
    chief.wait_for_all()
    chief.check()
    chief.close(success=success)
    errors = [end() for end in ends]
    assert errors == [None, None] if success else all("the chief failed" in each for each in errors)


def test_a_connection_that_breaks_means_that_the_chief_is_lost():
    cluster = cluster_of()
    host, port = cluster["chief"][0].split(":")
    with socket.create_server((host, int(port))) as listener:

        def answer_and_end():
            connection = listener.accept()[0]
            connection.recv(4096)
            connection.sendall(JOINED)
            connection.close()

        threading.Thread(target=answer_and_end, daemon=True).start()
        assert "the connection to the chief broke" in outcome(ChiefConnection(cluster, "ps", 0, SOON))()


@pytest.mark.parametrize(("answer", "received"), [(b"", "no answer within 1 s"), (b"HTTP", "another answer")])
def test_another_program_at_the_chiefs_address_is_told_from_it(answer, received):
    cluster = cluster_of()
    host, port = cluster["chief"][0].split(":")
    with socket.create_server((host, int(port))) as listener, contextlib.ExitStack() as held:

        def accept():
            connection = held.enter_context(listener.accept()[0])
            connection.recv(4096)
            connection.sendall(answer)

        threading.Thread(target=accept, daemon=True).start()
        with pytest.raises(ClusterError, match=rf"no chief. Received: {received}"):
            ChiefConnection(cluster, "worker", 0, 1.0)


def test_a_chief_that_cannot_be_reached_is_named():
    cluster = cluster_of()
    with pytest.raises(ClusterError, match=rf"chief 0 \({cluster['chief'][0]}\)"):
        ChiefConnection(cluster, "worker", 0, 0.5)


def test_tasks_that_do_not_join_are_named(membership):
    cluster = cluster_of(workers=2)
    chief = membership(cluster, timeout=1.0)
    present = ChiefConnection(cluster, "worker", 1, SOON)
    with pytest.raises(ClusterError, match=r"no connection from worker 0 \(.*\), ps 0 \(.*\) within 1 s"):
        chief.wait_for_all()
    assert present is not None  # held to here: its connection ends with it


def test_the_chief_waits_for_a_task_that_comes_late_and_for_no_evaluator(membership):
    cluster = cluster_of()
    chief = membership(cluster)
    waiting = threading.Thread(target=chief.wait_for_all, daemon=True)
    waiting.start()
    tasks = [ChiefConnection(cluster, job, 0, SOON) for job in ("ps", "evaluator")]
    waiting.join(0.5)
    assert waiting.is_alive()
    tasks.append(ChiefConnection(cluster, "worker", 0, SOON))
    waiting.join(SOON)
    assert not waiting.is_alive()
    tasks[1]._socket.close()  # an evaluator that is lost is nobody's loss
    chief.wait_for_loss()
    chief.check()


def test_an_evaluator_looks_whether_the_chief_is_done(membership):
    cluster = cluster_of()
    chief = membership(cluster)
    evaluator = ChiefConnection(cluster, "evaluator", 0, SOON)
    assert evaluator.wait(0.1) is False
    until(lambda: "evaluator 0" in chief._connections)
    chief.close(success=True)
    assert evaluator.wait(SOON) is True
    assert evaluator.wait(0.0) is True


def test_a_task_with_another_cluster_is_refused(membership):
    cluster = cluster_of()
    chief = membership(cluster)
    stranger = ChiefConnection({**cluster, "worker": ["127.0.0.1:1"]}, "worker", 0, SOON)
    with pytest.raises(ClusterError, match="different clusters. Received: worker 0 has"):
        chief.wait_for_all()
    with pytest.raises(ClusterLostError):
        stranger.wait()


def test_a_client_of_another_protocol_is_no_task(membership):
    cluster = cluster_of()
    chief = membership(cluster, timeout=1.0)
    host, port = cluster["chief"][0].split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ClusterError, match="worker 0"):
            chief.wait_for_all()


def test_a_connection_that_cannot_be_accepted_at_once_is_tried_again(membership, monkeypatch):
    cluster = cluster_of()
    chief = membership(cluster)
    tries, accept = [], socket.socket.accept

    def accept_later(self):
        tries.append(self)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    tasks = [ChiefConnection(cluster, job, 0, SOON) for job in ("worker", "ps")]
    chief.wait_for_all()
    assert len(tries) >= len(tasks)


def test_a_lost_ps_ends_training_at_once_and_a_lost_worker_does_not(membership):
    cluster = cluster_of(workers=2)
    chief = membership(cluster, timeout=1.0)
    tasks = {
        name: ChiefConnection(cluster, name[:-2], int(name[-1]), SOON) for name in ("worker 0", "worker 1", "ps 0")
    }
    chief.wait_for_all()
    tasks["worker 0"]._socket.close()
    chief.wait_for_loss()
    chief.check()
    tasks["worker 0"] = ChiefConnection(cluster, "worker", 0, SOON)
    tasks["worker 1"]._socket.close()
    time.sleep(1.5)  # longer than the time limit for no worker at all
    chief.check()
    tasks["ps 0"]._socket.close()
    assert "A ps is lost" in until_raised(chief.check)


def test_training_without_workers_ends_after_the_time_limit(membership):
    cluster = cluster_of()
    chief = membership(cluster, timeout=1.0)
    tasks = [ChiefConnection(cluster, job, 0, SOON) for job in ("worker", "ps")]
    chief.wait_for_all()
    tasks[0]._socket.close()
    chief.wait_for_loss()
    chief.check()
    assert "All workers are lost" in until_raised(chief.check)


def test_a_port_in_use_is_named():
    cluster = cluster_of()
    host, port = cluster["chief"][0].split(":")
    with socket.create_server((host, int(port))), pytest.raises(ClusterError, match="chief 0 at .*Fix: "):
        Membership(cluster, SOON)


def test_a_ps_that_was_lost_cannot_join_again(membership):
    """What it held of the model is gone; and the failure detector must still see that it sends no heartbeats."""
    cluster = cluster_of()
    chief = membership(cluster)
    tasks = {job: ChiefConnection(cluster, job, 0, SOON) for job in ("worker", "ps")}
    chief.wait_for_all()
    tasks["ps"]._socket.close()
    assert "ps 0" in until_raised(chief.check)
    assert set(chief.heartbeats()) == {"worker 0", "ps 0"}
    tasks["ps"] = ChiefConnection(cluster, "ps", 0, SOON)
    until(lambda: "ps 0" in chief._connections)
    assert "ps 0" in until_raised(chief.check)
