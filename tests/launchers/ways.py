"""The ways to start a training that README lists: what each needs, its command, and a training on two ranks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from kdist.errors import KDistError
from kdist.launchers import mpirun
from kdist.launchers.hosts.ports import free_ports
from tests.helpers import slurm, spmd

SCRIPT = str(Path(__file__).parent / "trained.py")
RANKS = 2
RTOL = 1e-9
TIMEOUT = 120.0  # seconds

MPIS = {"openmpi": "Open MPI", "mpich": "MPICH", "intel_mpi": "Intel MPI"}
PYTHONS = {"mpich": "KDIST_TEST_MPICH_PYTHON", "intel_mpi": "KDIST_TEST_INTEL_MPI_PYTHON"}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to start a training.

    Attributes:
        name: str, what README and the table call it.
        command: str, what a user writes.
        launcher: str, what kdist must recognise.
        engine: str, how the ranks must talk.
        start: function of a Slurm, if the way needs one, and of the script's arguments; it runs the training.
        versions: function that returns what it runs on, in words; it raises `Missing` if that is not here.
        needs_slurm: bool, whether it runs under Slurm.
    """

    name: str
    command: str
    launcher: str
    engine: str
    start: Callable[[Mapping[str, str], list[str]], spmd.Finished]
    versions: Callable[[], str]
    needs_slurm: bool = False

    def check(self, env: Mapping[str, str], expected: list[float]) -> None:
        """Trains and asserts that all ranks did it together, as one process does.

        Args:
            env: mapping, the variables of a running Slurm, or none.
            expected: list of float, what one process has computed.
        """
        with tempfile.TemporaryDirectory() as folder:
            done = self.start(env, [SCRIPT, folder])
            assert done.returncode == 0, f"exit code {done.returncode}\n{done.output}"
            for rank in range(RANKS):
                said = json.loads(Path(folder, f"{rank}.json").read_text())
                numbers = said.pop("numbers")
                assert said == {"size": RANKS, "launcher": self.launcher, "engine": self.engine}, said
                np.testing.assert_allclose(numbers, expected, rtol=RTOL, atol=RTOL)


class Missing(Exception):
    """What a way needs is not here; the text says what."""


def alone() -> list[float]:
    """Returns what one process computes."""
    with tempfile.TemporaryDirectory() as folder:
        done = spmd.execute([sys.executable, SCRIPT, folder], env=spmd.RANK_ENVIRONMENT, timeout=TIMEOUT)
        assert done.returncode == 0, done.output
        numbers: list[float] = json.loads(Path(folder, "0.json").read_text())["numbers"]
    return numbers


# What there is.


def _python(flavour: str) -> str:
    if flavour == "openmpi":
        return sys.executable
    if not (python := os.environ.get(PYTHONS[flavour], "")):
        raise Missing(f"{PYTHONS[flavour]} names no environment with {MPIS[flavour]}")
    return python


def _mpi(flavour: str) -> str:
    try:
        found = mpirun.find(_python(flavour), None)
    except KDistError as error:
        raise Missing(str(error).partition(" Expected")[0]) from error
    if found.flavour != flavour:
        raise Missing(f"the mpirun beside Python is that of {MPIS[found.flavour]}")
    return f"{MPIS[flavour]} {found.version}"


def _horovod() -> str:
    if importlib.util.find_spec("horovod") is None:
        raise Missing("Horovod is not installed; `kdist install-horovod` builds it")
    return f"Horovod {importlib.metadata.version('horovod').partition('+')[0]}"


def _horovod_over_mpi() -> str:
    versions = f"{_horovod()}, {_mpi('openmpi')}"
    from horovod.common.util import mpi_built

    if not mpi_built():
        raise Missing("Horovod was built without MPI")
    return versions


def _slurm() -> str:
    if why := slurm.missing():
        raise Missing(why)
    return f"Slurm {slurm.version()}"


def _slurm_with(flavour: str) -> str:
    return f"{_slurm()}, {_mpi(flavour)}"


# How it is started.


def _launched(flavour: str, launcher: str, env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    python = _python(flavour)
    # As in an active environment: Intel MPI's mpirun looks there for its own programs.
    env = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}", **env}
    return spmd.launch([python, *arguments], RANKS, launcher=launcher, python=python, env=env, timeout=TIMEOUT)


def _kdist_run(options: list[str], env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    command = [sys.executable, "-m", "kdist.cli.main", "run", *options, *arguments]
    return spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=TIMEOUT)


def _rendezvous(env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    (port,) = free_ports(1)
    run = f"{sys.executable} -m kdist.cli.main run --rendezvous 127.0.0.1:{port} --nnodes 2 -np 1"
    one, other = (f"{run} --node-rank {number} {shlex.join(arguments)}" for number in (0, 1))
    command = ["bash", "-c", f"{other} & {one} && wait $!"]
    return spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=TIMEOUT)


def _salloc(env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    run = [sys.executable, "-m", "kdist.cli.main", "run", *arguments]
    command = ["salloc", "--nodes=2", f"--ntasks={RANKS}", *run]
    return spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=TIMEOUT)


def _sbatch(nodes: int, options: list[str], env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    run = [sys.executable, "-m", "kdist.cli.main", "run", *options, *arguments]
    output = Path(arguments[-1], "output")  # a batch job has a file, and no terminal
    sizes = (f"--nodes={nodes}", f"--ntasks={RANKS}")
    command = ["sbatch", "--wait", *sizes, f"--output={output}", f"--wrap={shlex.join(run)}"]
    done = spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=TIMEOUT)
    return dataclasses.replace(done, output=done.output + (output.read_text() if output.exists() else ""))


def _srun_of_rendezvous(env: Mapping[str, str], arguments: list[str]) -> spmd.Finished:
    (port,) = free_ports(1)
    run = [sys.executable, "-m", "kdist.cli.main", "run", "--rendezvous", f"127.0.0.1:{port}", "-np", "1", *arguments]
    command = ["srun", "--mpi=none", "--nodes=2", "--ntasks-per-node=1", *run]
    return spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=TIMEOUT)


def _by_mpi(flavour: str, launcher: str, command: str) -> Way:
    start = functools.partial(_launched, flavour, launcher)
    name = f"{MPIS[flavour]}, {command.partition(' -')[0]}"
    return Way(name, command, flavour, "mpi", start, functools.partial(_mpi, flavour))


def _by_slurm(plugin: str, launcher: str, flavour: str, engine: str) -> Way:
    start = functools.partial(_launched, flavour, launcher)
    versions = functools.partial(_slurm_with, flavour) if engine == "mpi" else _slurm
    command = f"srun --mpi={plugin} python train.py"
    return Way(f"Slurm, {plugin}", command, "slurm", engine, start, versions, needs_slurm=True)


def _by_horovodrun(launcher: str, command: str, name: str, versions: Callable[[], str]) -> Way:
    start = functools.partial(_launched, "openmpi", launcher)
    return Way(name, command, "horovod", "horovod", start, versions)


RUN = f"kdist run -np {RANKS} train.py"
MPIRUN = f"mpirun -np {RANKS} python train.py"
NODES = "--rendezvous HOST:PORT --nnodes 2 --node-rank 0 -np 1 train.py"

WAYS = (
    _by_mpi("openmpi", "kdist_run_hydra", RUN),
    _by_mpi("openmpi", "openmpi", MPIRUN),
    _by_mpi("mpich", "kdist_run_hydra", RUN),
    _by_mpi("mpich", "mpich", MPIRUN),
    _by_mpi("intel_mpi", "kdist_run_hydra", RUN),
    _by_mpi("intel_mpi", "mpich", MPIRUN),
    _by_horovodrun("horovodrun_gloo", f"horovodrun -np {RANKS} --gloo python train.py", "Horovod, Gloo", _horovod),
    _by_horovodrun(
        "horovodrun_mpi", f"horovodrun -np {RANKS} --mpi python train.py", "Horovod, MPI", _horovod_over_mpi
    ),
    Way(
        "collective ops, kdist run",
        f"kdist run --strategy collective -np {RANKS} train.py",
        "tf_config",
        "collective",
        functools.partial(_kdist_run, ["--strategy", "collective", "-np", str(RANKS)]),
        str,
    ),
    Way(
        "collective ops, TF_CONFIG",
        "TF_CONFIG=... python train.py",
        "tf_config",
        "collective",
        functools.partial(_launched, "openmpi", "local_cluster"),
        str,
    ),
    Way("rendezvous", f"kdist run {NODES}", "tf_config", "collective", _rendezvous, str),
    _by_slurm("pmix", "srun_pmix", "openmpi", "mpi"),
    _by_slurm("pmi2", "srun_pmi2", "intel_mpi", "mpi"),
    _by_slurm("none", "srun", "openmpi", "collective"),
    Way(
        "Slurm, kdist run",
        f"salloc -N 2 -n {RANKS} kdist run train.py",
        "openmpi",
        "mpi",
        _salloc,
        functools.partial(_slurm_with, "openmpi"),
        needs_slurm=True,
    ),
    Way(
        "Slurm, kdist run in a batch script",
        f'sbatch -N 2 -n {RANKS} --wrap "kdist run train.py"',
        "openmpi",
        "mpi",
        functools.partial(_sbatch, 2, []),
        functools.partial(_slurm_with, "openmpi"),
        needs_slurm=True,
    ),
    Way(
        "Slurm, kdist run on one node",
        f'sbatch -N 1 -n {RANKS} --wrap "kdist run --strategy collective train.py"',
        "tf_config",
        "collective",
        functools.partial(_sbatch, 1, ["--strategy", "collective"]),
        _slurm,
        needs_slurm=True,
    ),
    Way(
        "Slurm, rendezvous",
        "srun --ntasks-per-node=1 kdist run --rendezvous HOST:PORT -np 1 train.py",
        "tf_config",
        "collective",
        _srun_of_rendezvous,
        _slurm,
        needs_slurm=True,
    ),
)
