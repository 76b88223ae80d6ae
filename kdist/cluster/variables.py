"""Reads launchers' variables; a malformed value is a `ClusterError` that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdist.cluster.info import ClusterInfo
from kdist.errors import ClusterError


def integer(env: Mapping[str, str], name: str, *, minimum: int, below: tuple[str, int] | None = None) -> int:
    """Returns the variable as an `int`.

    Args:
        env: mapping of variable name to value.
        name: str, the variable.
        minimum: int, the smallest valid value.
        below: optional pair of the name and the value of an exclusive upper bound, as
            `("OMPI_COMM_WORLD_SIZE", 4)`.

    Returns:
        The value, an int.

    Raises:
        ClusterError: if the variable is unset, not a decimal number, or out of range.
    """
    expected = f"an integer from {minimum}" if below is None else f"an integer from {minimum} and below {below[0]}"
    text = env.get(name)
    if text is None:
        raise ClusterError(
            f"{name} is not set. Received: other variables of the same launcher. Expected {expected}. "
            f"Fix: start the script with its launcher again, and keep its variables."
        )
    # Not `str.isdigit`, which also takes digits that `int` refuses, and not `int` alone, which takes "1_0".
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
    if number is None or number < minimum or (below is not None and number >= below[1]):
        bound = "" if below is None else f" ({below[1]})"
        raise ClusterError(
            f"{name} is malformed or out of range. Received: {name}={text!r}. Expected {expected}{bound}. "
            f"Fix: unset {name} if it is left over from another job, or start the script with its launcher again."
        )
    return number


def read_info(
    env: Mapping[str, str], launcher: str, *, rank: str, size: str, local_rank: str, local_size: str
) -> ClusterInfo:
    """Reads a `ClusterInfo` from four variables of one launcher.

    Args:
        env: mapping of variable name to value.
        launcher: str, the launcher's name.
        rank: str, the variable that holds the rank.
        size: str, the variable that holds the number of ranks.
        local_rank: str, the variable that holds the rank on this host.
        local_size: str, the variable that holds the number of ranks on this host.

    Returns:
        A `ClusterInfo` whose reason quotes the four variables.

    Raises:
        ClusterError: if a variable is unset, malformed or out of range.
    """
    total = integer(env, size, minimum=1)
    local_total = integer(env, local_size, minimum=1, below=(f"{size} + 1", total + 1))
    return ClusterInfo(
        launcher=launcher,
        rank=integer(env, rank, minimum=0, below=(size, total)),
        size=total,
        local_rank=integer(env, local_rank, minimum=0, below=(local_size, local_total)),
        local_size=local_total,
        reason=quote(env, (rank, size, local_rank, local_size)),
    )


def quote(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Returns `NAME=value` for each variable that is set, joined by commas."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)
