"""`kdist run` on several machines, on each of which it is started: `--nnodes`, `--node-rank`, `--rendezvous`."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence

from kdist.cli.jobs.parser import count, positive_seconds
from kdist.cluster.slurm import in_step
from kdist.errors import LaunchError
from kdist.launchers.nodes import START_TIMEOUT, Node

_PORT = 29400
_MAX_JOB = 200  # characters of the script and its arguments
_NAMES = {  # the arguments, and what services that start a program on each node tell it
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "node_rank": ("SLURM_NODEID", "JOB_COMPLETION_INDEX"),
}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the arguments to a group of a subcommand's parser."""
    group.add_argument(
        "--rendezvous",
        metavar="HOST[:PORT]",
        help=f"run the same command on each node; HOST is node 0 ({_PORT})",
    )
    group.add_argument("--nnodes", type=count, metavar="N", help="with --rendezvous: how many nodes there are")
    group.add_argument("--node-rank", type=count, metavar="I", help="with --rendezvous: this node, from 0 on")
    group.add_argument(
        "--start-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help=f"with --rendezvous: in which all nodes must come ({START_TIMEOUT:g})",
    )


def node_of(options: argparse.Namespace, words: Sequence[str], env: Mapping[str, str]) -> Node | None:
    """Returns this machine's place among several; `None` without `--rendezvous`.

    Args:
        options: the parsed arguments.
        words: sequence of str, the script and its arguments.
        env: mapping of variable name to value.

    Raises:
        LaunchError: if an argument is missing or wrong.
    """
    if options.rendezvous is None:
        given = [name for name in ("nnodes", "node_rank", "start_timeout") if getattr(options, name) is not None]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise LaunchError(
                f"{option} has no effect without --rendezvous. Received: {option} alone. Expected both. "
                "Fix: --rendezvous HOST:PORT, of node 0."
            )
        return None
    _check_others(options)
    host, port = _address(options.rendezvous)
    count, rank = (_number(options, name, env) for name in ("nnodes", "node_rank"))
    if count < 1 or not 0 <= rank < count:
        raise LaunchError(
            f"--node-rank is not below --nnodes. Received: --nnodes {count} --node-rank {rank}. Expected numbers "
            "from 0 to one below the number of nodes. Fix: change one of them."
        )
    if options.np is None or options.np < 1:
        raise LaunchError(
            f"No number of ranks given. Received: -np {options.np} with --rendezvous. Expected the number "
            "of this node's ranks. Fix: -np N."
        )
    job = shlex.join([os.path.basename(words[0]), *words[1:]])
    return Node(rank, count, host, port, options.np, _shortened(job))


def is_one_of_nodes(options: argparse.Namespace, env: Mapping[str, str]) -> bool:
    """Returns whether `srun` has started this command once on each node, so that its tasks are no ranks."""
    return options.rendezvous is not None and in_step(env) and "TF_CONFIG" not in env


def _shortened(job: str) -> str:
    """Returns what nodes compare of a job: one word of a command holds 128 KiB, and the whole command much more."""
    if len(job) <= _MAX_JOB:
        return job
    return f"{job[:_MAX_JOB]}... (SHA-256: {hashlib.sha256(os.fsencode(job)).hexdigest()[:16]})"


def _check_others(options: argparse.Namespace) -> None:
    others = {
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--ps": options.ps,
        "--oversubscribe": options.oversubscribe or None,
        "--restarts": getattr(options, "restarts", None),
        "--min-np": getattr(options, "min_np", None),
        "--max-np": getattr(options, "max_np", None),
        "--launcher-args": options.launcher_args or None,
        f"--strategy {options.strategy}": options.strategy not in (None, "auto", "collective") or None,
    }
    for name, value in others.items():
        if value is not None:
            raise LaunchError(
                f"{name} cannot be used with --rendezvous, where ranks talk by TensorFlow's collective ops. Received: "
                f"both. Expected one of them. Fix: omit {name}."
            )


def _address(text: str) -> tuple[str, int]:
    # An address of IPv6 stands in brackets, as in a URL.
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+))(?::([0-9]{1,5}))?", text)
    port = int(found[3] or _PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise LaunchError(
            f"--rendezvous is not HOST:PORT. Received: {text!r}. Expected the name or address of node 0, and a port, "
            f"as alpha:{_PORT} or [fd00::1]:{_PORT}. Fix: correct it."
        )
    return found[1] or found[2], port


def _number(options: argparse.Namespace, name: str, env: Mapping[str, str]) -> int:
    given: int | None = getattr(options, name)
    if given is not None:
        return given
    for variable in _NAMES[name]:
        if env.get(variable, "").isdecimal():
            return int(env[variable])
    option = f"--{name.replace('_', '-')}"
    raise LaunchError(
        f"{option} is missing. Received: --rendezvous without it, and none of {', '.join(_NAMES[name])}. Expected a "
        f"number. Fix: {option} N."
    )
