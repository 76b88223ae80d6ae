"""Regularizers and constraints of a table that a rank can compute of its rows alone."""

from __future__ import annotations

from typing import Any

import keras


def is_sum_over_rows(regularizer: Any) -> bool:
    """Returns whether the penalty of a table is the sum of those of its rows."""
    kinds = keras.regularizers
    return regularizer is None or type(regularizer) in (kinds.L1, kinds.L2, kinds.L1L2)


def is_by_row(constraint: Any) -> bool:
    """Returns whether a constraint changes each row, or each number, by itself."""
    kinds = keras.constraints
    if constraint is None or type(constraint) is kinds.NonNeg:
        return True
    is_of_norms = type(constraint) in (kinds.MaxNorm, kinds.UnitNorm, kinds.MinMaxNorm)
    return is_of_norms and constraint.axis in (1, -1, [1], [-1], (1,), (-1,))


def whole_table_rules(layer: keras.layers.Embedding) -> list[str]:
    """Returns the regularizer and the constraint of a layer that need all rows at once, as a user knows them."""
    regularizer, constraint = layer.embeddings_regularizer, layer.embeddings_constraint
    found = [] if is_sum_over_rows(regularizer) else [f"embeddings_regularizer={_shown(regularizer)}"]
    if not is_by_row(constraint):
        found.append(f"embeddings_constraint={_shown(constraint)}")
    return found


def _shown(rule: Any) -> str:
    axis = getattr(rule, "axis", None)
    name = getattr(rule, "__name__", type(rule).__name__)
    return name if axis is None else f"{name}(axis={axis})"
