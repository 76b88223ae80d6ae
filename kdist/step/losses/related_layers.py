"""Layers that relate rows in their forward pass, where Keras' own step computes the loss from their outputs."""

from __future__ import annotations

from typing import Any

import keras

from kdist.engines.engine import Engine
from kdist.reports.log import once
from kdist.state.rows.mixed_rows import first_mixed
from kdist.step.losses.step_rows import StepRows

_RELATED = (
    "The outputs of the model relate rows, by the operation {!r}: it takes the rows of each rank, where one process "
    "takes those of the global batch, and results differ. Fix: in the layer, take means and sums of "
    '`kdist.all_reduce(x, "mean")`, or rows of `kdist.all_gather(x)`'
)


def warn_of_related_layers(engine: Engine, rows: StepRows, values: Any) -> None:
    """Warns, once a job, of layers as one that subtracts the mean over the rows.

    A layer that sends messages is left to the user.

    Args:
        engine: `Engine`, how the ranks of the step communicate.
        rows: `StepRows` of the step.
        values: structure of tensors and others that Keras' step passes to a compiled loss.
    """
    if engine.size == 1 or engine.rank != 0:
        return
    outputs = [each for each in keras.tree.flatten(values) if rows.is_of_rows(each)]
    if not outputs or rows.is_in_branch(outputs[0]):
        return
    found = rows.at_hand(outputs[0])
    mixed = None if found is None else first_mixed(found, outputs, rows.known())
    if mixed is not None:
        once.warning(_RELATED.format(mixed.name))
