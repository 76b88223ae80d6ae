"""`kdist run -H` by a real ssh: the other host is this machine under another name, whose shell has its own PATH."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist.launchers.hosts.ports import free_ports
from tests.helpers import spmd

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")

pytestmark = [
    pytest.mark.skipif(SSHD is None, reason="sshd not found: apt-get install openssh-server"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a host name of a process's own needs root"),
]

SCRIPT = """
import json, os, sys
from kdist.cluster import detect
info = detect(os.environ)
said = {"rank": info.rank, "host": os.uname().nodename, "python": sys.executable, "text": os.environ["TF_TEXT"]}
print(json.dumps(said), file=open(f"{sys.argv[1]}/{info.rank}", "w"))
"""
TEXT = 'it\'s "a" $HOME; `text`'


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[list[str]]:
    """Yields the command that reaches the host `beta`."""
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True, timeout=60)
    (port,) = free_ports(1)
    daemon, client = tmp_path / "sshd_config", tmp_path / "ssh_config"
    daemon.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/key.pub\n"
        "StrictModes no\nPidFile none\n"
    )
    client.write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path}/key\nIdentitiesOnly yes\n"
        "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nConnectionAttempts 30\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without it
    command = f"hostname beta && exec {SSHD} -D -e -f {daemon}"
    with subprocess.Popen(
        ["unshare", "--uts", "sh", "-c", command], env={"PATH": "/usr/bin:/bin"}, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            limit = time.monotonic() + 10 * spmd.PATIENCE
            while not listens(port):
                if server.poll() is not None and server.stderr:
                    pytest.skip(f"sshd does not run here: {server.stderr.read()}")
                assert time.monotonic() < limit
                time.sleep(0.1)
            yield ["ssh", "-F", str(client)]
        finally:
            server.kill()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_a_host_is_reached_by_ssh(ssh: list[str], tmp_path: Path) -> None:
    """Its shell knows neither this environment nor its mpirun; what is forwarded arrives as it was."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    agent = f"--prtemca plm_ssh_agent '{' '.join(ssh)}'"
    run = [sys.executable, "-m", "kdist.cli.main", "run", "-H", "localhost:1,beta:2", "--launcher-args", agent]
    env = {**spmd.RANK_ENVIRONMENT, "TF_TEXT": TEXT}
    done = spmd.execute([*run, str(script), str(out)], env=env, timeout=60)
    assert done.returncode == 0, done.output
    said = [json.loads((out / str(rank)).read_text()) for rank in range(3)]
    assert [each["host"] for each in said] == [socket.gethostname(), "beta", "beta"]
    assert {each["text"] for each in said} == {TEXT}
    assert {each["python"] for each in said} == {sys.executable}
