"""What loading kdist loads: neither TensorFlow nor MPI, read off `sys.modules` of a fresh process."""

import sys

import pytest

from tests.helpers import spmd

HEAVY = ("tensorflow", "keras", "mpi4py")

TELL = f"import sys; print('LOADED', [name for name in {HEAVY} if name in sys.modules])"


def loaded_by(code: str) -> str:
    """Returns the last line that a fresh process prints, which tells what of HEAVY some code has loaded."""
    done = spmd.execute([sys.executable, "-c", f"{code}\n{TELL}"], timeout=120)
    assert done.returncode == 0, done.output
    return done.output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import kdist",
        "import kdist; dir(kdist)",
        "import kdist; kdist.errors.KDistError, kdist.scope, kdist.AllReduce, kdist.ClusterInfo",
        "import kdist; kdist.cluster_info(), kdist.rank(), kdist.size(), kdist.local_rank(), kdist.is_chief()",
        "import kdist.scaling, kdist.data.sharding, kdist.launchers.worker, kdist.launchers.mpirun",
        "from kdist.cli.main import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_neither_tensorflow_nor_mpi(code):
    assert loaded_by(code) == "LOADED []"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import kdist, tensorflow", "tensorflow"),
        ("import kdist, mpi4py", "mpi4py"),
        ("import kdist.strategies.all_reduce", "tensorflow"),
    ],
)
def test_the_check_sees_what_is_loaded(code, found):
    assert f"'{found}'" in loaded_by(code)
