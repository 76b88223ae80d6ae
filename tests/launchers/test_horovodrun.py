"""The builder of horovodrun's command line, and `kdist run --strategy horovod` under the real one."""

import shlex
import sys

import pytest

from kdist.errors import LaunchError
from kdist.launchers import horovodrun
from kdist.launchers.hosts.host import Host
from tests.helpers import needs, spmd
from tests.launchers.test_mpirun import MPICH, OPENMPI, PROGRAM, a_program


def line(**options):
    return shlex.join(horovodrun.build("/opt/bin/horovodrun", PROGRAM, **options).argv)


def test_without_an_mpi_the_job_uses_gloo():
    assert line(np=2) == "/opt/bin/horovodrun -np 2 --gloo python train.py"


def test_with_an_mpi_horovodrun_chooses():
    assert line(np=2, mpirun=MPICH, search_path="/opt/bin") == "/opt/bin/horovodrun -np 2 python train.py"


def test_open_mpi_gets_binding_options_that_it_parses():
    assert line(np=4, hosts=[Host("a", 2), Host("b", 2)], extra=["--verbose"], mpirun=OPENMPI) == (
        "/opt/bin/horovodrun -np 4 -H a:2,b:2 '--binding-args=--bind-to none --map-by slot' --verbose python train.py"
    )


def test_the_mpirun_that_was_found_is_the_first_on_the_path():
    def path(search_path):
        command = horovodrun.build(
            "horovodrun", PROGRAM, np=1, mpirun=OPENMPI, search_path=search_path, env={"KDIST_STRATEGY": "horovod"}
        )
        assert command.env["KDIST_STRATEGY"] == "horovod"
        return command.env.get("PATH")

    assert path("/usr/bin:/opt/bin") == "/opt/bin:/usr/bin:/opt/bin"
    assert path("/opt/bin:/usr/bin") is None


@pytest.mark.parametrize(("np", "hosts"), [(0, []), (3, [Host("a", 2)])])
def test_ranks_that_cannot_be_started_are_refused(np, hosts):
    with pytest.raises(LaunchError, match=f"Received: -np {np}"):
        horovodrun.build("horovodrun", PROGRAM, np=np, hosts=hosts)


def test_the_horovodrun_beside_python_has_priority(tmp_path):
    beside, elsewhere = tmp_path / "env" / "bin", tmp_path / "bin"
    beside.mkdir(parents=True)
    elsewhere.mkdir()
    python = str(beside / "python")
    with pytest.raises(LaunchError, match=r"(?s)none beside .*Fix: kdist install-horovod"):
        horovodrun.find(python, str(elsewhere))
    on_path = a_program(elsewhere / "horovodrun", "exit 0")
    assert horovodrun.find(python, str(elsewhere)) == str(on_path)
    first = a_program(beside / "horovodrun", "exit 0")
    assert horovodrun.find(python, str(elsewhere)) == str(first)


SCRIPT = """
import kdist
from kdist._engine import open_engine
engine = open_engine(kdist.cluster_info())
print(f"{kdist.cluster_info().launcher}: {engine.name} {engine.gather_objects(engine.rank)}", flush=True)
if engine.rank == 1:
    raise ValueError("boom")
engine.barrier()
"""


@needs.horovod
@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_kdist_run_starts_it_and_a_rank_that_raises_ends_the_job(controller, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "kdist.cli.main", "run", "--strategy", "horovod", "-np", "2"]
    done = spmd.execute([*line, f"--launcher-args={controller}", str(script)], env=spmd.RANK_ENVIRONMENT, timeout=150)
    assert not done.timed_out, done.output
    assert done.returncode == 1
    assert done.output.count("horovod: horovod [0, 1]") == 1  # rank 0's output alone
    assert done.output.count("[kdist] rank 1 of 2 on host") == 1
    assert done.output.count("ValueError: boom") == 1
    assert "[kdist] rank 0 of 2" not in done.output


@needs.horovod
def test_an_elastic_job_is_refused(tmp_path):
    hosts = a_program(tmp_path / "hosts", "echo localhost:1")
    (tmp_path / "train.py").write_text("import kdist\ntry: kdist.rank()\nexcept ValueError as err: print(err)")
    # With the interface named, it does not wait for a second host to compare.
    elastic = [
        "--gloo",
        "--network-interfaces",
        "lo",
        "--min-np",
        "1",
        "--max-np",
        "1",
        "--host-discovery-script",
        str(hosts),
    ]
    line = [sys.executable, horovodrun.find(sys.executable, None), "-np", "1", *elastic]
    done = spmd.execute([*line, sys.executable, str(tmp_path / "train.py")], env=spmd.RANK_ENVIRONMENT, timeout=120)
    assert "Horovod's elastic jobs are not supported" in done.output
    assert "without --min-np" in done.output
