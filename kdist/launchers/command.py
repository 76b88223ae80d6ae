"""A launcher's command line and the environment variables that it adds."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

_FORWARDED = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "KERAS_BACKEND", "KERAS_HOME"),
        *("CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "PYTHONHASHSEED"),
    )
)
_FORWARDED_PREFIXES = ("KDIST_", "TF_", "OMP_", "KMP_", "XLA_", "NCCL_", "UCX_", "FI_", "HOROVOD_")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that starts all ranks of a job.

    `str()` of it can be pasted into a shell; it is never run through one.

    Attributes:
        argv: tuple of str, the program and its arguments.
        env: mapping of variable name to value, added to this process's own environment.
        prints_boxes: bool, whether the launcher itself reports a failure, in boxes, after the rank has.
        prints_labels: bool, whether it labels what ranks print, so that all other lines are its own.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prints_boxes: bool = False
    prints_labels: bool = False

    def __str__(self) -> str:
        variables = (f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items()))
        return " ".join((*variables, shlex.join(self.argv)))


def variables_to_forward(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the variables that ranks on other hosts need, sorted.

    Args:
        env: mapping of variable name to value.

    Returns:
        A tuple of str, those that are set.
    """
    return tuple(sorted(name for name in env if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)))
