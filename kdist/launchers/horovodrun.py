"""Command lines for `horovodrun`, with the MPI controller where there is an MPI, else with Gloo."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from kdist.errors import LaunchError
from kdist.launchers.command import Command
from kdist.launchers.hosts.host import Host, check_slots
from kdist.launchers.mpirun import MPIRun


def find(python: str, search_path: str | None) -> str:
    """Finds `horovodrun`: the one beside this Python, or the first on the path.

    Args:
        python: str, the Python that runs the ranks.
        search_path: str or `None`, the value of `PATH`.

    Returns:
        The program, a str.

    Raises:
        LaunchError: if there is none.
    """
    found = shutil.which("horovodrun", path=os.path.dirname(python)) or shutil.which("horovodrun", path=search_path)
    if found is None:
        raise LaunchError(
            f"horovodrun was not found. Received: none beside {python} nor on PATH. Expected Horovod to be "
            "installed. Fix: kdist install-horovod"
        )
    return found


def build(
    horovodrun: str,
    program: Sequence[str],
    *,
    np: int,
    hosts: Sequence[Host] = (),
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    mpirun: MPIRun | None = None,
    search_path: str = "",
) -> Command:
    """Builds the command that starts a job.

    horovodrun forwards the whole environment to other hosts.

    Args:
        horovodrun: str, the launcher.
        program: sequence of str, what each rank runs.
        np: int, the number of ranks.
        hosts: sequence of `Host`; without any, this machine.
        extra: sequence of str, more arguments for horovodrun, after kdist's own.
        env: mapping of variable name to value, added to the ranks' environment.
        mpirun: `MPIRun` or `None`, the MPI that was found. Without one the job uses Gloo; with one, horovodrun
            chooses by what Horovod was built with.
        search_path: str, the value of `PATH`, on which horovodrun looks for mpirun.

    Returns:
        A `Command`.

    Raises:
        LaunchError: if the number of ranks is not positive or exceeds the slots.
    """
    check_slots(np, hosts)
    options = ["-np", str(np)]
    if hosts:
        options += ["-H", ",".join(map(str, hosts))]
    settings = {}
    if mpirun is None:
        options += ["--gloo"]
    else:
        if mpirun.flavour == "openmpi":
            # horovodrun's own `-bind-to none` is taken for a program by Open MPI 5.
            options += ["--binding-args=--bind-to none --map-by slot"]
        directory = os.path.dirname(mpirun.path)
        if search_path.split(os.pathsep)[0] != directory:
            settings["PATH"] = os.pathsep.join([directory, search_path])
    return Command((horovodrun, *options, *extra, *program), {**settings, **(env or {})}, prints_labels=True)
