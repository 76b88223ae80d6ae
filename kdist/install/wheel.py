"""Builds Horovod's wheel for the TensorFlow and the MPI of this environment, and finds one that was kept."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping

from kdist.errors import InstallError
from kdist.install import build_log, programs, source

# The last three Horovod's build would get by `python -m pip`, which an environment need not have.
_TOOLS = ("setuptools>=70,<81", "wheel", "packaging", "cmake>=3.18", "cloudpickle", "psutil", "pyyaml")
_PACKAGE = ("horovod", "tensorflow")  # whose library it is that needs MPI's
_STEP = 10  # percent between two reports of progress


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a wheel is built of, and for.

    Attributes:
        version: str, Horovod's.
        tensorflow: str, TensorFlow's version.
        mpi: str or `None`, which MPI, as `"openmpi5.0.11"`; `None` for Gloo alone.
        gpu_operations: str or `None`, `"NCCL"` for GPUs.
    """

    version: str
    tensorflow: str
    mpi: str | None
    gpu_operations: str | None = None

    @property
    def label(self) -> str:
        """What distinguishes the wheel from others of its version: a local version, as `"tf2.21.0.gloo.kdist2"`."""
        gpus = [self.gpu_operations] if self.gpu_operations else []
        parts = [f"tf{self.tensorflow}", self.mpi or "gloo", *gpus, f"kdist{source.REVISION}"]
        return re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower()).strip(".")

    @property
    def full_version(self) -> str:
        """The version that pip shows."""
        return f"{self.version}+{self.label}"


def kept(recipe: Recipe, directory: str) -> str | None:
    """Returns the wheel of a recipe that was kept in a directory for this Python, if there is one."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"horovod-{recipe.full_version}-{tag}-{tag}-*.whl"
    return next(iter(sorted(glob.glob(os.path.join(glob.escape(directory), pattern)))), None)


def build(
    recipe: Recipe,
    directory: str,
    say: Callable[[str], None],
    run: Callable[[list[str]], str] = programs.run,
    follow: Callable[..., int] = programs.follow,
) -> str:
    """Builds a wheel, in a temporary directory.

    Args:
        recipe: `Recipe`, what to build.
        directory: str, where the wheel goes.
        say: function that tells the user of progress.
        run: function that runs a command.
        follow: function that runs a command, as `programs.follow`.

    Returns:
        The wheel's name, a str.

    Raises:
        InstallError: if it cannot be built; the log is kept.
    """
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kdist-horovod-") as place:
        say(f"getting Horovod {recipe.version} and what builds it")
        code = source.get(recipe.version, place, run)
        tools = os.path.join(place, "tools")
        run([*programs.pip(), "install", "--quiet", "--disable-pip-version-check", "--target", tools, *_TOOLS])
        say(f"building it for {recipe.label}, which takes some minutes")
        handle, log = tempfile.mkstemp(prefix="kdist-horovod-", suffix=".log")
        os.close(handle)
        wheel_command = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", directory]
        env = environment(recipe, os.environ, tools, num_jobs=len(os.sched_getaffinity(0)))
        failed = follow([*programs.pip(), *wheel_command, code], env=env, log=log, hear=_Progress(say))
    found = kept(recipe, directory)
    if failed or found is None:
        with open(log, encoding="utf-8") as file:
            raise InstallError(
                f"Horovod does not build. Received, as the first error:\n{build_log.first_error(file)}\n"
                f"Expected: a wheel in {directory}. Fix: see the whole log, {log}."
            )
    os.unlink(log)
    return found


def environment(recipe: Recipe, env: Mapping[str, str], tools: str, num_jobs: int) -> dict[str, str]:
    """Returns the environment in which Horovod's own build finds everything.

    Args:
        recipe: `Recipe`, what to build.
        env: mapping, the user's environment; what it says of CUDA, NCCL and compilers is kept.
        tools: str, the directory with CMake and what builds wheels.
        num_jobs: int, how many compilers may run at a time.

    Returns:
        A dictionary.
    """

    def joined(*paths: str | None) -> str:
        return os.pathsep.join(path for path in paths if path)

    here = os.path.dirname(sys.executable)
    # An MPI of this environment is looked for from where Horovod is, so that the wheel serves other environments too.
    library = os.path.relpath(os.path.join(sys.prefix, "lib"), os.path.join(sysconfig.get_path("platlib"), *_PACKAGE))
    chosen = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_LOCAL_VERSION": recipe.label,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # its Gloo asks for an older CMake than there is
        "MAKEFLAGS": f"-j{num_jobs}",
        "PATH": joined(os.path.join(tools, "bin"), here, env.get("PATH")),
        "PYTHONPATH": joined(tools, env.get("PYTHONPATH")),
        "LDFLAGS": f"{env.get('LDFLAGS', '')} -Wl,-rpath,$ORIGIN/{library}".strip(),
    }
    left_alone = {name: value for name, value in env.items() if name not in ("HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI")}
    chosen["HOROVOD_WITHOUT_MPI" if recipe.mpi is None else "HOROVOD_WITH_MPI"] = "1"
    if recipe.gpu_operations is not None:
        chosen["HOROVOD_GPU_OPERATIONS"] = recipe.gpu_operations
    return {**left_alone, **chosen}


class _Progress:
    """Tells how much of the build is done, once in a while."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._next = _STEP

    def __call__(self, line: str) -> None:
        percent = build_log.percent(line)
        if percent is not None and percent >= self._next:
            self._say(f"{percent} %")
            self._next = percent - percent % _STEP + _STEP
