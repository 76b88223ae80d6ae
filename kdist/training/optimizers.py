"""Which optimizers a model holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that a model holds, each once, in a fixed order: the compiled one and any attribute."""
    found: dict[int, keras.optimizers.Optimizer] = {}

    def visit(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for layer in model._flatten_layers():
        for value in list(vars(layer).values()):
            visit(value)
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in found.values()}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that holds the learning rate: the inner one of a `LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def is_learning_rate(variable: Any, optimizers: Sequence[keras.optimizers.Optimizer]) -> bool:
    """Returns whether a variable is a learning rate: the ranks' callbacks agree on those by themselves."""
    holders = [innermost(optimizer) for optimizer in optimizers]
    holders += [part for holder in holders for part in getattr(holder, "optimizers", ())]  # a `MultiOptimizer`
    return any(variable is holder._learning_rate for holder in holders)
