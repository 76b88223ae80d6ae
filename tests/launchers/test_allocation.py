"""What schedulers tell of an allocation: the number of ranks, and whether it is this host alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kdist.launchers.hosts.allocation import Allocation, allocation_of, is_elsewhere

HERE = socket.gethostname()
OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": HERE, "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("env", "allocation"),
    [
        (OF_SLURM, Allocation(4, "SLURM_NTASKS=4", True)),
        # On a login node, by `salloc`, and on a node whose name in Slurm is no host's.
        ({**OF_SLURM, "SLURM_JOB_NODELIST": "no-such-node"}, Allocation(4, "SLURM_NTASKS=4", False)),
        (
            {**OF_SLURM, "SLURM_JOB_NODELIST": "no-such-node", "SLURMD_NODENAME": "no-such-node"},
            Allocation(4, "SLURM_NTASKS=4", True),
        ),
        (
            {**OF_SLURM, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": f"{HERE},other"},
            Allocation(4, "SLURM_NTASKS=4", False),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "2"},
            Allocation(6, "SLURM_NTASKS_PER_NODE=2, SLURM_JOB_NUM_NODES=3", False),
        ),
        ({"SLURM_JOB_ID": "7"}, Allocation(None, "SLURM_NTASKS", False)),
        (
            {"LSB_MCPU_HOSTS": f"{HERE} 4", "LSB_DJOB_NUMPROC": "4"},
            Allocation(4, "LSB_DJOB_NUMPROC=4", True),
        ),
        (
            {"LSB_MCPU_HOSTS": f"{HERE} 4 no-such-node 2", "LSB_DJOB_NUMPROC": "6"},
            Allocation(6, "LSB_DJOB_NUMPROC=6", False),
        ),
        ({"HOME": "/"}, None),
    ],
)
def test_variables(env: dict[str, str], allocation: Allocation | None) -> None:
    assert allocation_of(env) == allocation
    assert is_elsewhere(env) == (allocation is not None and not allocation.is_here)


def test_files(tmp_path: Path) -> None:
    nodes, hosts = tmp_path / "nodes", tmp_path / "hosts"
    nodes.write_text(f"{HERE}\n{HERE}\n\n")
    assert allocation_of({"PBS_NODEFILE": str(nodes)}) == Allocation(2, f"the lines of PBS_NODEFILE={nodes}", True)
    nodes.write_text(f"{HERE}\nno-such-node\n{HERE}\nno-such-node\n")
    assert allocation_of({"PBS_NODEFILE": str(nodes)}) == Allocation(4, f"the lines of PBS_NODEFILE={nodes}", False)
    hosts.write_text(f"{HERE} 4 main.q@{HERE} UNDEFINED\nno-such-node 2 main.q@no-such-node UNDEFINED\n")
    assert allocation_of({"PE_HOSTFILE": str(hosts), "NSLOTS": "6"}) == Allocation(6, "NSLOTS=6", False)


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "PE_HOSTFILE"])
def test_a_file_of_another_host_tells_nothing(name: str, tmp_path: Path) -> None:
    found = allocation_of({name: str(tmp_path / "none")})
    assert found is not None
    assert (found.ranks, found.is_here) == (None, False)
