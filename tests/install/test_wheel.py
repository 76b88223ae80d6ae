"""The version of a wheel, the search for a kept one, and the environment of a build."""

import sys

import pytest

from kdist.errors import InstallError
from kdist.install import prerequisites, wheel
from kdist.install.prerequisites import Prerequisites
from kdist.install.wheel import Recipe

WITH_MPI = Recipe("0.28.1", "2.21.0", "openmpi5.0.11")
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("recipe", "version"),
    [
        (WITH_MPI, "0.28.1+tf2.21.0.openmpi5.0.11.kdist2"),
        (Recipe("0.28.1", "2.21.0", None), "0.28.1+tf2.21.0.gloo.kdist2"),
        (
            Recipe("0.28.1", "2.21.0rc1", "intelmpi2021.9 Update 1", "NCCL"),
            "0.28.1+tf2.21.0rc1.intelmpi2021.9.update.1.nccl.kdist2",
        ),
    ],
)
def test_the_version_of_a_wheel(recipe, version):
    assert recipe.full_version == version


def test_only_a_wheel_of_the_same_recipe_is_found(tmp_path):
    others = ["0.28.1", "0.28.1+tf2.20.0.openmpi5.0.11.kdist2", "0.28.1+tf2.21.0.openmpi5.0.11"]
    for name in [*(f"horovod-{v}-{TAG}-{TAG}-linux_x86_64.whl" for v in others), "horovod-0.28.1.tar.gz"]:
        (tmp_path / name).touch()
    (tmp_path / f"horovod-{WITH_MPI.full_version}-cp27-cp27-linux_x86_64.whl").touch()
    assert wheel.find_kept(WITH_MPI, str(tmp_path)) is None
    same = tmp_path / f"horovod-{WITH_MPI.full_version}-{TAG}-{TAG}-linux_x86_64.whl"
    same.touch()
    assert wheel.find_kept(WITH_MPI, str(tmp_path)) == str(same)
    assert wheel.find_kept(WITH_MPI, str(tmp_path / "nowhere")) is None


def test_the_environment_of_a_build():
    users = {"PATH": "/bin", "HOROVOD_NCCL_HOME": "/nccl", "HOROVOD_WITH_MPI": "1", "LDFLAGS": "-L/x"}
    env = wheel.environment(Recipe("0.28.1", "2.21.0", None, "NCCL"), users, "/tools", num_jobs=3)
    assert env["PATH"].startswith("/tools/bin:")
    assert env["PATH"].endswith(":/bin")
    assert env["PYTHONPATH"] == "/tools"
    assert env["MAKEFLAGS"] == "-j3"
    assert env["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in env
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["HOROVOD_NCCL_HOME"] == "/nccl"
    assert env["LDFLAGS"].startswith("-L/x -Wl,-rpath,$ORIGIN/../")
    env = wheel.environment(WITH_MPI, {}, "/tools", num_jobs=1)
    assert env["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in env


def test_everything_that_is_missing_is_named():
    nothing = Prerequisites(None, None, None, None, None)
    with pytest.raises(InstallError, match="(?s)TensorFlow.*g\\+\\+.*mpicxx.*--without-mpi.*CUDA"):
        prerequisites.check(nothing, with_mpi=True, gpu_operations="NCCL")
    assert len(nothing.missing(with_mpi=False, gpu_operations=None)) == 2
    prerequisites.check(Prerequisites("2.21.0", "c++", None, None, None), with_mpi=False, gpu_operations=None)


def test_prerequisites_are_found(monkeypatch):
    found = prerequisites.find()
    assert found.tensorflow
    assert found.mpi
    assert found.mpi.startswith(("openmpi", "mpich"))
    assert prerequisites.find(which=lambda name, path=None: None).compiler is None
    monkeypatch.setenv("CXX", sys.executable)
    assert prerequisites.find().compiler == sys.executable
