"""Which hosts answer: each is asked by the program that the launcher starts ranks by, which is ssh by default."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

LIMIT = 10.0
"""Seconds in which a host must answer."""

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={LIMIT:.0f}")

# How another program is named: Open MPI 5, Open MPI 4, and Hydra of MPICH and Intel MPI.
_PARAMETERS = frozenset(("plm_ssh_agent", "plm_rsh_agent"))
_OPTIONS = frozenset(("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec"))
_OF_SSH = {"--ssh-port": "-p", "--ssh-identity-file": "-i"}  # of horovodrun, which has no other program
_VARIABLES = (
    *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
    *("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


def agent(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the program, with its arguments, by which a launcher runs commands on other hosts.

    Args:
        arguments: sequence of str, the additional arguments of the launcher.
        env: mapping, its environment.
    """
    named = [value for name, value in zip(arguments, arguments[1:], strict=False) if name in {*_PARAMETERS, *_OPTIONS}]
    named += [env[name] for name in _VARIABLES if env.get(name)]
    if not named:
        of_horovodrun = zip(arguments, arguments[1:], strict=False)
        return (*_SSH, *(word for name, value in of_horovodrun if name in _OF_SSH for word in (_OF_SSH[name], value)))
    first, *more = shlex.split(re.split(r"\s:\s", named[0])[0])  # Open MPI takes the first that exists: "ssh : rsh"
    return (*_SSH, *more) if first == "ssh" else (first, *more)


@functools.cache  # a name server may be slow, and is asked every half minute
def is_this_host(name: str) -> bool:
    """Returns whether a host is this one: whether one of its addresses can be listened at.

    Args:
        name: str, a name or an address.
    """
    own = socket.gethostname()
    # Not by the first part alone: there is a `node1` in another domain, too.
    if name in (own, own.partition(".")[0]) or name == socket.getfqdn():
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


class RemoteCommand:
    """A command that runs on several hosts at once. On this host it runs without the agent.

    Args:
        agent: sequence of str, what `agent` returned.
        hosts: iterable of str, the names.
        command: sequence of str, words without characters that a shell would change.

    Attributes:
        succeeded: set of str, the hosts on which it has succeeded so far.
    """

    def __init__(self, agent: Sequence[str], hosts: Iterable[str], command: Sequence[str] = ("true",)) -> None:
        self.succeeded: set[str] = set()
        self._asked: dict[str, subprocess.Popen[bytes]] = {}
        self._deadline = time.monotonic() + LIMIT
        for host in hosts:
            program = [*command] if is_this_host(host) else [*agent, host.strip("[]"), *command]
            with contextlib.suppress(OSError):
                self._asked[host] = subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # it may have children
                )

    def is_over(self) -> bool:
        """Returns whether it has ended on all hosts, or time is up."""
        is_late = time.monotonic() > self._deadline
        for host, process in list(self._asked.items()):
            if process.poll() == 0:
                self.succeeded.add(host)
            elif process.returncode is None and is_late:
                _kill(process)
            elif process.returncode is None:
                continue
            del self._asked[host]
        return not self._asked

    def close(self) -> None:
        """Kills it where it has not ended."""
        while self._asked:
            _kill(self._asked.popitem()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
