"""A Slurm of two nodes on this one host: `python -m tests.helpers.slurm COMMAND` runs a command within it.

Its daemons, files and ports are its own. They need root, and Debian's packages, which `bash tests/run` installs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kdist.launchers.hosts.ports import free_ports
from tests.helpers import spmd

NODES = ("n0", "n1")
ADDRESSES = ("127.0.0.1", "127.0.0.2")  # two, so that ranks of two nodes share no host
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "scancel")
START = 30.0  # seconds in which all nodes must be idle
GUARD = "--guard"  # the first argument of the process that ends the daemons

CONFIGURATION = """\
ClusterName=kdist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Returns why no Slurm can be started here; empty if it can."""
    if lacking := [name for name in PROGRAMS if _program(name) is None]:
        return f"{', '.join(lacking)} not found: apt-get install slurm-wlm slurm-wlm-basic-plugins munge libpmix-dev"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


def version() -> str:
    """Returns the version of the Slurm that is installed."""
    program = _program("slurmctld")
    assert program is not None
    return subprocess.run([program, "-V"], capture_output=True, text=True, timeout=30, check=True).stdout.split()[-1]


class Slurm:
    """A running Slurm.

    Attributes:
        directory: path, where its files and logs are.
        env: mapping, the variables by which Slurm's commands find it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {"SLURM_CONF": str(directory / "slurm.conf")}

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 180, cwd: Path = spmd.ROOT
    ) -> spmd.Finished:
        """Runs a command of Slurm's to its end; see `spmd.execute`."""
        environment = {**spmd.RANK_ENVIRONMENT, **self.env, **(env or {})}
        return spmd.execute(command, env=environment, timeout=timeout, cwd=cwd)

    def ask(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Returns what a short command says, as `squeue`."""
        environment = {**os.environ, **self.env, **(env or {})}
        done = subprocess.run(
            command, env=environment, cwd=spmd.ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def logs(self) -> str:
        """Returns the ends of the daemons' logs."""
        return "\n".join(
            f"--- {file.name}:\n{file.read_text()[-3000:]}" for file in sorted(self.directory.glob("*.log"))
        )


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Starts the daemons; a process of its own ends them and all that they have started, also if this one is killed.

    Yields:
        A `Slurm` whose nodes are idle.
    """
    if why := missing():
        raise RuntimeError(f"no Slurm can be started, whose tests may not be skipped: {why}")
    slurm = Slurm(Path(tempfile.mkdtemp(prefix="slurm-")))
    guard = [sys.executable, "-m", "tests.helpers.slurm", GUARD, str(slurm.directory)]
    with subprocess.Popen(guard, cwd=spmd.ROOT, stdin=subprocess.PIPE, start_new_session=True):
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            _start(slurm, daemons)
            yield slurm
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                slurm.ask("scancel", "--full", "--signal=KILL", "--user=root")
    for daemon in daemons:
        daemon.wait()


def _guard(directory: str) -> None:
    """Waits for the end of the standard input, which the process that has started the daemons holds, and ends them."""
    sys.stdin.read()
    while _kill_all_of(directory):
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def _start(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    directory = slurm.directory
    directory.chmod(0o755)
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir()
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (directory / "slurm.conf").write_text(_configuration(directory))

    def start(name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with open(directory / f"{Path(name).name}.out", "ab") as said:
            daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env={**os.environ, **slurm.env},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    files = {name: str(directory / "munge" / name) for name in ("socket", "key", "pid", "seed", "log")}
    start(
        "munged",
        *("--foreground", "--force", f"--socket={files['socket']}", f"--key-file={files['key']}"),
        *(f"--pid-file={files['pid']}", f"--seed-file={files['seed']}", f"--log-file={files['log']}"),
    )
    _wait_for("munged", slurm, lambda: Path(files["socket"]).exists())
    start("slurmctld", "-D", "-c")
    for node in NODES:
        start("slurmd", "-D", "-N", node)
    _wait_for("the nodes", slurm, lambda: _states(slurm) == ["idle"] * len(NODES))


def _configuration(directory: Path) -> str:
    host, (port, *ports) = socket.gethostname(), free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={each} CPUs=16 State=UNKNOWN"
        for node, address, each in zip(NODES, ADDRESSES, ports, strict=True)
    )
    return CONFIGURATION.format(host=host, port=port, directory=directory, nodes=nodes)


def _states(slurm: Slurm) -> list[str]:
    with contextlib.suppress(subprocess.SubprocessError):
        return slurm.ask("sinfo", "--Node", "--noheader", "--format=%t").split()
    return []


def _wait_for(what: str, slurm: Slurm, is_there: Callable[[], bool]) -> None:
    limit = time.monotonic() + START * spmd.PATIENCE
    while not is_there():
        if time.monotonic() > limit:
            raise RuntimeError(f"{what} did not start within {START * spmd.PATIENCE:g} s\n{slurm.logs()}")
        time.sleep(0.2)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _kill_all_of(directory: str) -> int:
    """Kills each process whose environment or open files name the directory, in any session; returns how many."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                # slurmstepd erases its environment, and writes to the log.
                files = [os.readlink(file) for file in (entry / "fd").iterdir()]
                if directory.encode() in (entry / "environ").read_bytes() or any(directory in file for file in files):
                    os.kill(int(entry.name), signal.SIGKILL)
                    count += 1
    return count


def main(command: Sequence[str]) -> int:
    """Runs a command within a Slurm of its own."""
    if command[0] == GUARD:
        _guard(command[1])
        return 0
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    with running() as slurm:
        return subprocess.run(command, env={**os.environ, **slurm.env}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
