"""Participants of a rendezvous over TCP, and what else comes to their port."""

import concurrent.futures
import dataclasses
import json
import socket
import time

import pytest

from kdist.errors import LaunchError
from kdist.launchers.hosts.ports import free_ports
from kdist.launchers.rendezvous import Participant, RendezvousTexts, rendezvous

TEXTS = RendezvousTexts(*["participant"] * 6)
HELLO = {"rank": 1, "count": 2, "job": "", "name": "here", "addresses": ["x:1"], "payload": []}
STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    *(
        json.dumps({**HELLO, **other}).encode() + b"\n"
        for other in (
            {"name": "elsewhere"},
            {"rank": 99},
            {"rank": -1},
            {"rank": [1]},
            {"rank": True},
            {"count": "2"},
            {"addresses": "x:1"},
            {"addresses": [1]},
            {"more": 1},
        )
    ),
]


def participant(rank, port, host="127.0.0.1"):
    return Participant(
        rank, 2, host, port, num_ports=1, job="", texts=TEXTS, name="here", own_host=host, payload=[rank]
    )


def meet(one):
    with rendezvous(one, 30.0) as (infos, _):
        return infos


def connected(port):
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_strangers_are_turned_away_and_the_participants_meet():
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, participant(0, port))
        for text in STRANGERS:
            with connected(port) as stranger:
                stranger.sendall(text)
                assert stranger.recv(1) == b"", text
        second = threads.submit(meet, participant(1, port))
        assert first.result(60) == second.result(60)
        assert [each.payload for each in first.result()] == [[0], [1]]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_participants_meet_over_ipv6():
    (port,) = free_ports(1)
    participants = [dataclasses.replace(participant(rank, port, "::1"), own_host="") for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, participants)
    assert first == second
    assert all(each.addresses[0].startswith("[::1]:") for each in first)


def test_a_participant_comes_again_until_all_have_come_and_then_the_port_is_free():
    """What listened there first was of another job."""
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with socket.create_server(("127.0.0.1", port)) as other:
            other.settimeout(30.0)
            second = threads.submit(meet, participant(1, port))
            other.accept()[0].close()
        with rendezvous(participant(0, port), 30.0) as (infos, _):
            assert second.result(60) == infos
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def test_another_number_of_participants_is_told_of():
    (port,) = free_ports(1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, participant(0, port))
        second = threads.submit(meet, dataclasses.replace(participant(1, port), rank=4, count=5))
        for each in (first, second):
            with pytest.raises(LaunchError, match="differ in their number"):
                each.result(60)
