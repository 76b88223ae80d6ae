"""`shard="optimizer"`: the features of the fidelity suite with it, slots in memory, files, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kdist
from tests.training import fidelity
from tests.training.features import FEATURES

SHARD = kdist.AllReduce(shard="optimizer")


def sharded(case: Callable[[], None]) -> Callable[[], None]:
    """Returns a case whose scopes of N ranks have optimizers in parts."""

    @functools.wraps(case)
    def run() -> None:
        scope = kdist.scope

        def in_parts(strategy: Any = "auto", **given: Any) -> Any:
            assert strategy == "auto", "the case has a strategy of its own"
            return scope(SHARD, **given)

        kdist.scope = in_parts
        try:
            case()
        finally:
            kdist.scope = scope

    return run


SHARDED = {name: sharded(case) for name, case in {**FEATURES, **fidelity.MATRIX}.items()}
