"""Connections between the hosts of a job."""

import socket

import pytest

from kdist.cluster.connections import address, connect, host_and_port, is_known, listen, own_hosts


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


def has_ipv6_loopback():
    """Returns whether it has an address, which a container may lack."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_host_is_reached_by_all_its_addresses(monkeypatch):
    """Also where its name has a loopback address, as in Debian's /etc/hosts, or is that of a gateway."""
    with listen(socket.gethostname(), 0, 5) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6_loopback() else [])):
            connect([host], port).close()
        with pytest.raises(OSError, match="in use"):
            listen("a.gateway.invalid", port, 5)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(socket.gethostname(), 0, 5) as server:
        connect(["127.0.0.2"], server.getsockname()[1]).close()


def test_what_is_written_as_loopback_is_reached_there_only():
    with listen("127.0.0.1", 0, 5) as server, pytest.raises(OSError, match="refused"):
        connect(["127.0.0.2"], server.getsockname()[1])
    if has_ipv6_loopback():
        with listen("::1", 0, 5) as server, pytest.raises(OSError, match="refused"):
            connect(["127.0.0.1"], server.getsockname()[1])


def test_an_address_is_one_word():
    assert [address("a", 1), address("10.0.0.1", 1), address("fd00::1", 1)] == ["a:1", "10.0.0.1:1", "[fd00::1]:1"]
    assert [host_and_port(each) for each in ("a:1", "[fd00::1]:1")] == [("a", 1), ("fd00::1", 1)]


def test_names_that_are_known():
    assert is_known("127.0.0.1")
    assert not is_known("no.such.host.invalid")
