"""Who is compared: each contender's framework, how many processes it has, and how they are started."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kdist.launchers.hosts.ports import free_ports
from kdist.launchers.start import module_command

# What `kdist run` sets for its ranks, and all contenders have alike: what pages cost is none's merit.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
KERAS3 = {"KERAS_BACKEND": "tensorflow"}
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}  # also for Horovod's binding, which imports tf.keras
JAX = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        title: str, its name in tables.
        train: str, `module:function` of this package; the function is given a `Task`.
        needs: tuple of str, the modules that must be installed.
        env: mapping, environment variables of its processes.
        launcher: str, a key of `LAUNCHERS`, or `""`: one process.
        base: str, the contender that is the same framework in one process; `""` for that one itself.
    """

    title: str
    train: str
    needs: tuple[str, ...]
    env: Mapping[str, str]
    launcher: str = ""
    base: str = ""

    @property
    def ranks(self) -> int:
        """The number of its processes."""
        return 2 if self.launcher else 1

    @property
    def is_kdist(self) -> bool:
        """Whether it is one of kdist's engines, as users would have it."""
        return self.train in ("keras3:in_scope", "keras3:in_scope_compiled") and self.ranks > 1

    def takes(self, kind: str, device: str) -> bool:
        """Whether it can be given an input of one of `INPUTS`, on one of `DEVICES`."""
        if self.train.startswith("keras3:"):
            return device == "gpu" or "compiled" not in self.train
        return kind == "arrays" and device == "cpu"

    @property
    def shares_nothing(self) -> bool:
        """Whether its processes train by themselves: a GPU adds in no fixed order, so their weights may differ."""
        return self.train.startswith("keras3:side_by_side")

    @property
    def is_peer(self) -> bool:
        """Whether it is what others have for several processes."""
        return self.ranks > 1 and not self.train.startswith("keras3:")


def over(title: str, strategy: str, launcher: str, *needs: str, train: str = "keras3:in_scope") -> Contender:
    """Returns kdist on two ranks; it would refuse another strategy than this."""
    env = {**KERAS3, "KDIST_STRATEGY": strategy}
    return Contender(title, train, ("tensorflow", "keras", *needs), env, launcher, "plain_keras")


def legacy(title: str, train: str, launcher: str = "", *needs: str) -> Contender:
    """Returns a contender on tf_keras."""
    base = "plain_tf_keras" if launcher else ""
    return Contender(title, f"legacy_keras:{train}", ("tensorflow", "tf_keras", *needs), LEGACY, launcher, base)


CONTENDERS = {
    "plain_keras": Contender("plain Keras 3", "keras3:plain", ("tensorflow", "keras"), KERAS3),
    "plain_small_pages": Contender(
        "plain Keras 3, without huge pages", "keras3:plain", ("tensorflow", "keras"), {**KERAS3, "GLIBC_TUNABLES": ""}
    ),
    "plain_pair": Contender(
        "two of plain Keras 3 side by side, the slower one's time",
        *("keras3:side_by_side", ("tensorflow", "keras", "mpi4py"), KERAS3, "mpirun", "plain_keras"),
    ),
    "plain_pair_in_step": Contender(
        "two of plain Keras 3 that wait for each other after each step",
        *("keras3:side_by_side_in_step", ("tensorflow", "keras", "mpi4py"), KERAS3, "mpirun", "plain_keras"),
    ),
    "scope": Contender(
        "one rank in kdist.scope()", "keras3:in_scope", ("tensorflow", "keras"), KERAS3, "", "plain_keras"
    ),
    "kdist_mpi": over("kdist over MPI", "mpi", "mpirun", "mpi4py"),
    "kdist_horovod": over("kdist over Horovod", "horovod", "mpirun", "horovod"),
    "kdist_collective": over("kdist over TensorFlow's collectives", "collective", "local_cluster"),
    "plain_pair_uncompiled": Contender(
        "two of plain Keras 3 side by side, jit_compile=False",
        *("keras3:side_by_side_uncompiled", ("tensorflow", "keras", "mpi4py"), KERAS3, "mpirun", "plain_keras"),
    ),
    "kdist_mpi_compiled": over(
        "kdist over MPI, jit_compile=True", "mpi", "mpirun", "mpi4py", train="keras3:in_scope_compiled"
    ),
    "kdist_collective_compiled": over(
        "kdist over TensorFlow's collectives, jit_compile=True",
        *("collective", "local_cluster"),
        train="keras3:in_scope_compiled",
    ),
    "kdist_checked": over(
        "kdist over MPI, ReplicaCheck(every=1)", "mpi", "mpirun", "mpi4py", train="keras3:in_scope_checked"
    ),
    "plain_tf_keras": legacy("plain tf_keras", "plain"),
    "horovod_mpirun": legacy("Horovod's binding on tf_keras, mpirun", "horovod", "mpirun", "horovod"),
    "horovod_gloo": legacy("Horovod's binding on tf_keras, Gloo", "horovod", "horovodrun", "horovod"),
    "multi_worker": legacy("MultiWorkerMirroredStrategy on tf_keras", "multi_worker", "local_cluster"),
    "plain_pytorch": Contender("plain PyTorch", "pytorch:plain", ("torch",), {}),
    "ddp": Contender("PyTorch DDP", "pytorch:ddp", ("torch",), {}, "torchrun", "plain_pytorch"),
    "plain_jax": Contender("plain Keras on JAX", "jax_keras:plain", ("jax", "keras"), JAX),
    "jax_parallel": Contender(
        "Keras on JAX, DataParallel", "jax_keras:data_parallel", ("jax", "keras"), JAX, "local_cluster", "plain_jax"
    ),
}


def launch_line(launcher: str, ranks: int) -> list[str]:
    """Returns the beginning of the command that starts the ranks: what stands before `python script.py`."""
    np = ["-np", str(ranks)]
    if launcher == "mpirun":
        return [program("mpirun"), *np, "--oversubscribe", "--bind-to", "none"]
    if launcher == "horovodrun":
        return [program("horovodrun"), *np, "--gloo"]
    if launcher == "local_cluster":
        return [*module_command(sys.executable, "kdist.launchers.local_cluster"), *np]
    if launcher == "torchrun":
        address = ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *address, "--no-python"]
    return []


def program(name: str) -> str:
    """Returns where a program is: beside the interpreter, or else on the path; its name if nowhere."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name) or name
