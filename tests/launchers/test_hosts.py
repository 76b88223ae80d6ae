"""Hosts: both formats, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.errors import LaunchError
from kdist.launchers.hosts.host import Host, all_local, parse_hostfile, parse_hosts


def test_hosts_with_and_without_slots():
    assert parse_hosts("a:2,b,10.0.0.1:3") == (Host("a", 2), Host("b", 1), Host("10.0.0.1", 3))
    assert parse_hosts("[::1]:4") == (Host("[::1]", 4),)


def test_a_host_named_twice_has_the_sum():
    assert parse_hosts("a:2,b,a") == (Host("a", 3), Host("b", 1))


def test_hostfiles_of_open_mpi_and_mpich():
    text = "# nodes\nnode1 slots=4\nnode2\tslots = 2 max_slots=4\n\nnode3:3  # the slow one\nnode4\n"
    assert parse_hostfile(text, "hosts") == (Host("node1", 4), Host("node2", 2), Host("node3", 3), Host("node4", 1))


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:-1", "a:x", "a b", "-oProxyCommand=x:1", "a:1:2", "::1", "a;b"])
def test_invalid_hosts_are_refused(text):
    with pytest.raises(LaunchError, match=r"(?s)Received.*Expected.*Fix"):
        parse_hosts(text)


@pytest.mark.parametrize("line", ["a slots=0", "a slots=x", "a:2 slots=2", "a slot=2", "a 4", "-x slots=1"])
def test_invalid_lines_are_refused_by_number(line):
    with pytest.raises(LaunchError, match="line 2 of some/file"):
        parse_hostfile(f"good slots=1\n{line}\n", "some/file")


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_an_empty_hostfile_is_refused(text):
    with pytest.raises(LaunchError, match="names no hosts"):
        parse_hostfile(text, "hosts")


@given(st.text(alphabet="ab1-:,.[] =#\n\tslot", max_size=20))
def test_any_text_is_parsed_or_refused(text):
    for parse in (parse_hosts, lambda text: parse_hostfile(text, "hosts")):
        try:
            hosts = parse(text)
        except LaunchError:
            continue
        assert hosts
        assert all(host.slots >= 1 and host.name and not host.name.startswith("-") for host in hosts)


def test_local_hosts():
    assert all_local((), "me")
    assert all_local((Host("localhost"), Host("127.0.0.1"), Host("me")), "me.example.org")
    assert not all_local((Host("localhost"), Host("other")), "me")
