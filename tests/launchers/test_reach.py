"""Which hosts answer, by a real program in the place of ssh."""

import os
import socket
import time
from pathlib import Path

import pytest

from kdist.launchers.hosts import reach

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ([], {}, SSH),
        (["--prtemca", "plm_ssh_agent", "/opt/agent"], {}, ("/opt/agent",)),
        (["-x", "A", "--mca", "plm_rsh_agent", "ssh -p 2222 : rsh"], {}, (*SSH, "-p", "2222")),
        (["-launcher-exec", "/opt/agent"], {}, ("/opt/agent",)),
        (["plm_ssh_agent"], {}, SSH),  # without a value
        (["--ssh-port", "2222", "--verbose", "--ssh-identity-file", "key"], {}, (*SSH, "-p", "2222", "-i", "key")),
        ([], {"PRTE_MCA_plm_ssh_agent": "rsh -x"}, ("rsh", "-x")),
        (["-bootstrap-exec", "mine"], {"HYDRA_LAUNCHER_EXEC": "other"}, ("mine",)),
    ],
)
def test_the_program_that_reaches_hosts(arguments, env, expected):
    assert reach.agent(arguments, env) == expected


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", socket.gethostname(), socket.getfqdn()])
def test_this_host(name):
    assert reach.is_this_host(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid", f"{socket.gethostname()}.other.invalid"])
def test_other_hosts(name):
    assert not reach.is_this_host(name)


@pytest.fixture
def agent(tmp_path):
    """`up` answers, `down` does not, and `slow` never does."""
    path = tmp_path / "agent"
    path.write_text(
        "#!/bin/sh\n[ $1 = down ] && exit 255\n"
        f'[ $1 = slow ] && {{ echo $$ > {tmp_path}/pid; sleep 600; }}\nshift; "$@"\n'
    )
    path.chmod(0o755)
    return (os.fspath(path),)


def succeeded(command):
    while not command.is_over():
        time.sleep(0.02)
    return command.succeeded


def test_all_are_asked_at_once(agent):
    assert succeeded(reach.RemoteCommand(agent, ["up", "down", "up2", "localhost"])) == {"up", "up2", "localhost"}
    assert succeeded(reach.RemoteCommand(agent, [])) == set()
    assert succeeded(reach.RemoteCommand(("/no/such/program",), ["up", "localhost"])) == {"localhost"}


@pytest.mark.parametrize("close", [False, True])
def test_a_host_that_hangs_is_not_waited_for(agent, tmp_path, monkeypatch, close):
    monkeypatch.setattr(reach, "LIMIT", 60.0 if close else 1.0)
    command = reach.RemoteCommand(agent, ["up", "slow"])
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text() or (not close and not command.is_over()):
        time.sleep(0.02)
    if close:
        command.is_over()
        command.close()
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert close or command.succeeded == {"up"}


def test_a_command_on_a_host(agent, tmp_path):
    for host in ("up", "localhost"):
        assert succeeded(reach.RemoteCommand(agent, [host], ("touch", f"{tmp_path}/{host}"))) == {host}
        assert (tmp_path / host).exists()
