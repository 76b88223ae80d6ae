"""Builds Horovod's wheel for the TensorFlow and the MPI of this environment, or finds a kept one."""

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

# Horovod's build would install the last three by `python -m pip`, which may not exist.
_TOOLS = ("setuptools>=70,<81", "wheel", "packaging", "cmake>=3.18", "cloudpickle", "psutil", "pyyaml")
_PACKAGE = ("horovod", "tensorflow")  # the package whose library links MPI
_STEP = 10  # percent between two reports of progress


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a wheel is built from and for.

    Attributes:
        version: str, Horovod's version.
        tensorflow: str, TensorFlow's version.
        mpi: str or `None`, the MPI, as `"openmpi5.0.11"`; `None` for Gloo only.
        gpu_operations: str or `None`, `"NCCL"` for GPUs.
    """

    version: str
    tensorflow: str
    mpi: str | None
    gpu_operations: str | None = None

    @property
    def label(self) -> str:
        """The local version of the wheel, which identifies its build, as `"tf2.21.0.gloo.kdist2"`."""
        gpus = [self.gpu_operations] if self.gpu_operations else []
        parts = [f"tf{self.tensorflow}", self.mpi or "gloo", *gpus, f"kdist{source.REVISION}"]
        return re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower()).strip(".")

    @property
    def full_version(self) -> str:
        """The version that pip shows."""
        return f"{self.version}+{self.label}"


def find_kept(recipe: Recipe, directory: str) -> str | None:
    """Returns the wheel of a recipe for this Python that a directory has, or `None`."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"horovod-{recipe.full_version}-{tag}-{tag}-*.whl"
    return next(iter(sorted(glob.glob(os.path.join(glob.escape(directory), pattern)))), None)


def build(
    recipe: Recipe,
    directory: str,
    log_progress: Callable[[str], None],
    run: Callable[[list[str]], str] = programs.run,
    run_logged: Callable[..., int] = programs.run_logged,
) -> str:
    """Builds a wheel, in a temporary directory.

    Args:
        recipe: `Recipe`, what to build.
        directory: str, the directory of the wheel.
        log_progress: function of a message to the user.
        run: function that runs a command.
        run_logged: function that runs a command, as `programs.run_logged`.

    Returns:
        A str, the wheel's path.

    Raises:
        InstallError: if it cannot be built. The log is kept.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:  # before minutes of building
        raise InstallError(
            f"The wheel cannot be written. Received: {error}. Expected a writable directory, {directory}. Fix: choose "
            "another one by --wheel-dir."
        ) from error
    with tempfile.TemporaryDirectory(prefix="kdist-horovod-") as temporary:
        log_progress(f"downloading Horovod {recipe.version} and its build tools")
        source_directory = source.download(recipe.version, temporary, run)
        tools = os.path.join(temporary, "tools")
        run([*programs.pip(), "install", "--quiet", "--disable-pip-version-check", "--target", tools, *_TOOLS])
        log_progress(f"building it for {recipe.label}, which takes some minutes")
        handle, log = tempfile.mkstemp(prefix="kdist-horovod-", suffix=".log")
        os.close(handle)
        wheel_command = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", directory]
        env = environment(recipe, os.environ, tools, num_jobs=len(os.sched_getaffinity(0)))
        command = [*programs.pip(), *wheel_command, source_directory]
        failed = run_logged(command, env=env, log=log, on_line=_Progress(log_progress))
    found = find_kept(recipe, directory)
    if failed or found is None:
        with open(log, encoding="utf-8") as file:
            raise InstallError(
                f"The build of Horovod failed. Received, as the first error:\n{build_log.first_error(file)}\n"
                f"Expected: a wheel in {directory}. Fix: the cause in the log, {log}."
            )
    os.unlink(log)
    return found


def environment(recipe: Recipe, env: Mapping[str, str], tools: str, num_jobs: int) -> dict[str, str]:
    """Returns the environment variables of Horovod's build.

    Args:
        recipe: `Recipe`, what to build.
        env: mapping, the user's environment; its settings for CUDA, NCCL and compilers are kept.
        tools: str, the directory of CMake and the other build tools.
        num_jobs: int, the number of parallel compiler processes.

    Returns:
        A dict of str.
    """

    def joined(*paths: str | None) -> str:
        return os.pathsep.join(path for path in paths if path)

    here = os.path.dirname(sys.executable)
    # The path of this environment's MPI is relative to Horovod's, so that the wheel works in other environments, too.
    library = os.path.relpath(os.path.join(sys.prefix, "lib"), os.path.join(sysconfig.get_path("platlib"), *_PACKAGE))
    settings = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_LOCAL_VERSION": recipe.label,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # its Gloo requires an older CMake
        "MAKEFLAGS": f"-j{num_jobs}",
        "PATH": joined(os.path.join(tools, "bin"), here, env.get("PATH")),
        "PYTHONPATH": joined(tools, env.get("PYTHONPATH")),
        "LDFLAGS": f"{env.get('LDFLAGS', '')} -Wl,-rpath,$ORIGIN/{library}".strip(),
    }
    inherited = {name: value for name, value in env.items() if name not in ("HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI")}
    settings["HOROVOD_WITHOUT_MPI" if recipe.mpi is None else "HOROVOD_WITH_MPI"] = "1"
    if recipe.gpu_operations is not None:
        settings["HOROVOD_GPU_OPERATIONS"] = recipe.gpu_operations
    return {**inherited, **settings}


class _Progress:
    """Logs the progress of the build every `_STEP` percent."""

    def __init__(self, log_progress: Callable[[str], None]):
        self._log = log_progress
        self._next = _STEP

    def __call__(self, line: str) -> None:
        percent = build_log.percent(line)
        if percent is not None and percent >= self._next:
            self._log(f"{percent} %")
            self._next = percent - percent % _STEP + _STEP
