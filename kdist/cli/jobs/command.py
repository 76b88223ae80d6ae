"""What `kdist run` and `kdist check` start: the command of the launcher that fits the arguments."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._arguments import check_environment
from kdist.cli.jobs import nodes
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.parser import closest, count
from kdist.cluster import detect
from kdist.errors import LaunchError
from kdist.launchers import horovodrun, local_cluster, mpirun
from kdist.launchers.command import Command, variables_to_forward
from kdist.launchers.hosts import reach
from kdist.launchers.hosts.allocation import allocation_of, is_elsewhere
from kdist.launchers.hosts.capacity import Placement
from kdist.launchers.hosts.host import Host, all_local, check_slots, parse_hostfile, parse_hosts
from kdist.launchers.nodes import START_TIMEOUT, Node
from kdist.strategies.selection import PARAMETER_SERVER, PASSED_THROUGH, WORDS


def add_launch_arguments(parser: argparse.ArgumentParser, otherwise: str = "") -> None:
    """Adds the arguments for the number of ranks and their hosts.

    Args:
        parser: the subcommand's parser.
        otherwise: str, the number of ranks where none is known.
    """
    ranks = parser.add_argument_group("ranks and hosts")
    known = "number of ranks; by default all slots of the hosts, or of a scheduler"
    ranks.add_argument("-np", type=count, metavar="N", help=f"{known}, or {otherwise}" if otherwise else known)
    where = ranks.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts, and the ranks that each may run")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one host per line: `host slots=4` or `host:4`")
    ranks.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than the slots of -H or --hostfile"
    )
    start = parser.add_argument_group("strategy and launcher")
    start.add_argument(
        "--strategy",
        metavar="WORD",
        help=f"the strategy and its launcher: {', '.join(_words())} (sets KDIST_STRATEGY for the ranks)",
    )
    start.add_argument(
        "--ps", type=count, metavar="N", help="with --strategy parameter_server: how many ranks hold variables (1)"
    )
    start.add_argument("--launcher-args", default="", metavar="ARGS", help="additional arguments for the launcher")


def take_allocation(options: argparse.Namespace, env: Mapping[str, str], least: int = 1) -> None:
    """Sets the number of ranks to the one that a scheduler has allocated, and says so, if no argument tells it.

    Args:
        options: the parsed arguments.
        env: mapping of variable name to value.
        least: int, what is taken from fewer on: an allocation for less ranks is left out.

    Raises:
        LaunchError: if the launcher would not use the hosts of the allocation.
    """
    given = (options.np, options.hosts, options.hostfile, getattr(options, "rendezvous", None))
    if given != (None, None, None, None):
        return
    found = allocation_of(env)
    if found is None or found.ranks is None or found.ranks < least:
        return
    _check_not_a_rank(env)
    if _word(options, env) == "horovod" and not found.is_here:
        raise LaunchError(
            f"horovodrun does not take the hosts of a scheduler. Received: no -np and no hosts; {found.why}. Expected "
            "both, as all ranks would be on this host. Fix: kdist run -H alpha:4,beta:4 ..., or `srun python SCRIPT` "
            "with KDIST_STRATEGY=horovod."
        )
    options.np = found.ranks
    tell(f"-np {found.ranks}, by {found.why}")


# TensorFlow allocates gradients and activations again in each step, and the system clears each page of them: 2 MiB at a
# time where it gives huge pages on request. Ratios are in docs/performance.md.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


# Sets of strings, as of labels, have one order on all ranks, and in all attempts of a job.
_ONE_ORDER_OF_SETS = {"PYTHONHASHSEED": "0"}


def _defaults(env: Mapping[str, str], *, is_one_process: bool) -> Mapping[str, str]:
    """Returns the variables that the ranks get unless the user has set them."""
    every = _HUGE_PAGES if is_one_process else {**_HUGE_PAGES, **_ONE_ORDER_OF_SETS}
    return {name: value for name, value in every.items() if name not in env}


def _word(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    return options.strategy or env.get("KDIST_STRATEGY", "auto")


def build(
    options: argparse.Namespace,
    program: Sequence[str],
    reports: str | None = None,
    node: Node | None = None,
    placement: Placement | None = None,
) -> Command:
    """Builds the command that starts a job, from the arguments of `add_launch_arguments`.

    Args:
        options: the parsed arguments.
        program: sequence of str, what each rank runs.
        reports: str or `None`, the directory in which a launcher of kdist reports which rank failed first.
        node: `Node` or `None`, this machine's place among several.
        placement: `Placement` or `None`, the hosts and ranks, if they are not those of the arguments.

    Returns:
        A `Command`.

    Raises:
        LaunchError: if the job cannot be started as asked.
    """
    if node is None or not nodes.is_one_of_nodes(options, os.environ):
        _check_not_a_rank(os.environ)
    check_environment(os.environ)
    if node is not None:
        strategies = {} if options.strategy is None else {"KDIST_STRATEGY": options.strategy}
        env = {**_defaults(os.environ, is_one_process=False), **strategies}
        python, timeout = sys.executable, options.start_timeout or START_TIMEOUT
        return local_cluster.build(
            python, program, np=node.np, env=env, reports=reports, node=node, start_timeout=timeout
        )
    hosts = hosts_of(options) if placement is None else _launched(placement)
    np = num_ranks(options, hosts) if placement is None else placement.np
    if np is None:
        found = allocation_of(os.environ)
        raise LaunchError(
            f"No number of ranks given. Received: neither -np nor hosts{f', nor {found.why}' if found else ''}. "
            "Expected -np N. Fix: kdist run -np 2 train.py"
        )
    check_slots(np, hosts, oversubscribe=options.oversubscribe)
    strategy, variable = options.strategy, os.environ.get("KDIST_STRATEGY")
    if strategy is not None and variable not in (None, strategy):
        raise LaunchError(
            f"Two different strategies are given. Received: --strategy {strategy} and KDIST_STRATEGY={variable}. "
            "Expected one. Fix: omit --strategy, or unset KDIST_STRATEGY."
        )
    env = {
        **_defaults(os.environ, is_one_process=np == 1 and placement is None),
        **({} if strategy is None else {"KDIST_STRATEGY": _check_strategy(strategy)}),
    }
    job = _Job(
        program=program,
        np=np,
        hosts=hosts,
        local=all_local(hosts, socket.gethostname()) and not is_elsewhere(os.environ),
        extra=launcher_arguments(options),
        env=env,
        ps=options.ps,
        oversubscribe=options.oversubscribe,
        reports=reports,
        heals=getattr(options, "heal", None) is not None,
    )
    word = _word(options, os.environ)
    if job.ps is not None and (word != PARAMETER_SERVER or job.ps < 1):
        raise LaunchError(
            f"--ps needs parameter servers. Received: --ps {job.ps} with the strategy {word!r}. Expected at least 1, "
            "with --strategy parameter_server. Fix: change one of them."
        )
    return _BUILDERS.get(word, _by_mpirun)(job)


def _launched(placement: Placement) -> Sequence[Host]:
    # mpirun takes this host for another one if the network has gone whose address is given.
    is_here = all(reach.is_this_host(host.name) for host in placement.hosts)
    return (Host("localhost", placement.np),) if is_here else placement.hosts


@dataclasses.dataclass(frozen=True)
class _Job:
    """What to start, with any launcher."""

    program: Sequence[str]
    np: int
    hosts: Sequence[Host]
    local: bool  # whether all ranks are on this machine
    extra: Sequence[str]  # additional arguments for the launcher
    env: Mapping[str, str]  # added to the ranks' environment
    ps: int | None  # the number of parameter servers, if given
    oversubscribe: bool  # whether there may be more ranks than slots
    reports: str | None = None  # where a launcher of kdist reports which rank failed first
    heals: bool = False  # whether ranks go on when another one is killed

    @property
    def mpi_env(self) -> Mapping[str, str]:
        """What is added to the environment of an mpirun and of its ranks."""
        directory = self.reports if self.local else None
        return {**self.env, **mpirun.own_session_directory(directory, os.environ, self.extra)}


def _automatically(job: _Job) -> Command:
    # One process here needs no mpirun, which does not pass on what is typed: it is in a session of its own.
    if job.np > 1 or not job.local or job.extra:
        return _by_mpirun(job)
    return local_cluster.build(sys.executable, job.program, np=1, env=job.env, reports=job.reports, is_cluster=False)


def _by_mpirun(job: _Job) -> Command:
    return _by_this_mpirun(mpirun.find(sys.executable, os.environ.get("PATH")), job)


def _by_this_mpirun(found: mpirun.MPIRun, job: _Job) -> Command:
    return mpirun.build(
        found,
        job.program,
        np=job.np,
        hosts=job.hosts,
        extra=job.extra,
        env=job.mpi_env,
        forward=() if job.local else variables_to_forward({**os.environ, **job.env}),
        root=os.geteuid() == 0,
        # Open MPI refuses more ranks than cores, and does not count hardware threads.
        oversubscribe=job.local or job.oversubscribe,
        survives=job.heals,
    )


def _by_local_cluster(job: _Job) -> Command:
    if job.local and not job.extra:
        return local_cluster.build(sys.executable, job.program, np=job.np, env=job.env, reports=job.reports)
    # On several hosts mpirun starts the ranks, which exchange their addresses over MPI.
    try:
        found = mpirun.find(sys.executable, os.environ.get("PATH"))
    except LaunchError as error:
        if job.local:
            raise
        raise LaunchError(
            "On several hosts mpirun starts the ranks of --strategy collective. Received: "
            f"{str(error).partition('. ')[0]}. Expected one, or a launcher without MPI. Fix: in Slurm `srun --mpi=none "
            "python SCRIPT`; elsewhere `kdist run --rendezvous HOST:PORT --nnodes N --node-rank I ...` on each host."
        ) from error
    return _by_this_mpirun(found, job)


def _by_roles(job: _Job) -> Command:
    if job.local and not job.extra:
        ps = job.ps or 1
        return local_cluster.build(sys.executable, job.program, np=job.np, env=job.env, ps=ps, reports=job.reports)
    if job.ps is not None:
        raise LaunchError(
            f"--ps is not supported on several hosts, where mpirun starts the ranks. Received: --ps {job.ps}. Expected "
            f"the number in the script. Fix: kdist.scope(kdist.ParameterServer(num_ps={job.ps})), and omit --ps."
        )
    return _by_mpirun(job)


def _by_horovodrun(job: _Job) -> Command:
    search_path = os.environ.get("PATH", "")
    try:
        mpi = mpirun.find(sys.executable, search_path)
    except LaunchError:
        mpi = None
    return horovodrun.build(
        horovodrun.find(sys.executable, search_path),
        job.program,
        np=job.np,
        hosts=job.hosts,
        extra=job.extra,
        env=job.mpi_env,
        mpirun=mpi,
        search_path=search_path,
    )


# The launchers of the strategies for which mpirun is not the first choice.
_BUILDERS: Mapping[str, Callable[[_Job], Command]] = {
    "auto": _automatically,
    "single": _automatically,
    "collective": _by_local_cluster,
    "horovod": _by_horovodrun,
    PARAMETER_SERVER: _by_roles,
}


def num_ranks(options: argparse.Namespace, hosts: Sequence[Host]) -> int | None:
    """Returns the number of ranks, or `None` if nothing tells.

    Args:
        options: the parsed arguments.
        hosts: sequence of `Host`, those that they name.
    """
    np: int | None = options.np
    return sum(host.slots for host in hosts) if np is None and hosts else np


def hosts_of(options: argparse.Namespace) -> tuple[Host, ...]:
    """Returns the hosts that the arguments name, if they do; a hostfile is read again each time.

    Args:
        options: the parsed arguments.

    Raises:
        LaunchError: if they cannot be read.
    """
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        with open(options.hostfile, encoding="utf-8") as file:
            return parse_hostfile(file.read(), options.hostfile)
    except (OSError, UnicodeDecodeError) as err:
        raise LaunchError(
            f"The hostfile cannot be read. Received: --hostfile {options.hostfile}: {err}. Expected a text file with "
            "one host per line. Fix: check the path, or pass the hosts to -H."
        ) from err


def _check_strategy(strategy: str) -> str:
    if strategy in PASSED_THROUGH:
        raise LaunchError(
            f"This strategy runs in one process. Received: --strategy {strategy}. Expected one of several processes. "
            f"Fix: KDIST_STRATEGY={strategy} python SCRIPT."
        )
    if strategy in WORDS:
        return strategy
    meant = closest(strategy, _words())
    raise LaunchError(
        f"Unknown strategy. Received: --strategy {strategy}. Expected one of {', '.join(_words())}. "
        f"Fix: {f'did you mean {meant}?' if meant else 'choose one.'}"
    )


def _words() -> list[str]:
    return [word for word in WORDS if word not in PASSED_THROUGH]


def launcher_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the additional arguments of the launcher.

    Args:
        options: the parsed arguments.

    Raises:
        LaunchError: if they cannot be parsed.
    """
    text = options.launcher_args
    try:
        return shlex.split(text)
    except ValueError as err:
        raise LaunchError(
            f"--launcher-args cannot be parsed. Received: {text!r}: {err}. Expected arguments as in a shell. "
            "Fix: close the quotation."
        ) from err


def _check_not_a_rank(env: Any) -> None:
    """Raises if this process is a rank: each rank would start a whole job."""
    info = detect(env)
    if info.size > 1:
        raise LaunchError(
            f"kdist run was started inside of a job. Received: a process that is rank {info.rank} of {info.size} "
            f"({info.launcher}: {info.reason}). Expected a single process. Fix: start the script itself with "
            f"{info.launcher}, or unset its variables."
        )
