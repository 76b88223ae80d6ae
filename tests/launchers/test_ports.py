"""Ports that no other process finds."""

import socket

from kdist.launchers.hosts import ports


def test_a_held_port_is_found_by_no_other_and_is_free_afterwards(monkeypatch):
    monkeypatch.setattr(ports, "PORTS", range(20_000, 20_002))
    monkeypatch.setattr(ports, "_ATTEMPTS", 2)
    with ports.held_port() as first, ports.held_port() as second, ports.held_port() as third:
        assert len({first, second, third}) == 3
    with socket.create_server(("", first)):
        pass
