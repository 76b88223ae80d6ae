"""Ranks on standby, as processes."""

import os
import socket
import subprocess
import sys
import time

from kdist.launchers.standby import Standby
from tests.helpers import spmd

_RANK = "import sys; from kdist.launchers.standby import wait; wait(sys.argv[1]); print('keras' in sys.modules)"


def test_ranks_begin_when_they_are_let_those_that_come_later_too():
    standby = Standby(everywhere=True)
    ranks = [_waiting_rank(standby)]
    standby.begin()
    ranks.append(_rank(standby))
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["True\n", "True\n"]
    standby.close()


def test_what_has_found_the_port_by_chance_is_no_rank():
    standby = Standby(everywhere=False)
    port = int(standby.address.split(":")[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1")
        assert stranger.recv(1) == b""
    assert not standby._waiting
    assert not standby.has_lost
    standby.close()


def test_ranks_end_if_the_job_never_begins():
    standby = Standby(everywhere=False)
    rank = _waiting_rank(standby)
    assert not standby.has_lost
    standby.close()
    assert rank.communicate(timeout=20)[0] == ""
    assert rank.returncode == 1


def _waiting_rank(standby):
    rank = _rank(standby)
    while not standby._waiting:
        assert rank.poll() is None
        time.sleep(0.1)
    return rank


def _rank(standby):
    command, env = [sys.executable, "-c", _RANK, standby.address], {**os.environ, **spmd.LEAN}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
