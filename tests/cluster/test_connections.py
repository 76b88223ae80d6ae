"""Connections between the hosts of a job."""

import socket

import pytest

from kdist.cluster.connections import connect, own_hosts


def test_the_first_address_that_answers_is_taken_and_read_without_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with connect(["127.0.0.2", "127.0.0.1"], port) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
            assert connection.gettimeout() is None  # ranks on standby wait for hours


def test_no_address_that_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        connect(["127.0.0.2", "127.0.0.1"], port)


def test_own_hosts_end_with_the_name():
    assert own_hosts()[-1] == socket.gethostname()
