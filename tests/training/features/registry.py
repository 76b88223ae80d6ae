"""The registry of features: each is a case, N ranks against one process (see `fidelity.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tests.training.fidelity import both, fed, fit_alone, fit_evaluate_predict, mlp, rows

FEATURES: dict[str, Callable[[], None]] = {}


def feature(function: Callable[[], None]) -> Callable[[], None]:
    assert function.__name__ not in FEATURES, f"two features are called {function.__name__}"
    FEATURES[function.__name__] = function
    return function


def simple(
    compile_: Callable[[], dict[str, Any]],
    shape: str = "ragged",
    model: Callable[[], keras.Model] = mlp,
    kind: str = "arrays",
    rtol: float = 1e-9,
    scope: dict[str, Any] | None = None,
    all_methods: bool = False,
    **fit: Any,
) -> None:
    x, y = rows(shape)

    def script(batch: int) -> dict[str, Any]:
        made = model()
        made.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse", **compile_()})
        data = fed(kind, (x, y), batch)
        return fit_evaluate_predict(made, data, x, y, batch, **fit) if all_methods else fit_alone(made, data, **fit)

    both(script, rtol=rtol, **(scope or {}))
