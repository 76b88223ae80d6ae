"""Layers that relate rows in their forward pass, where Keras' own step computes the loss from their outputs."""

from __future__ import annotations

from typing import Any

import keras

from kdist.reports.log import once
from kdist.state.rows.mixed_rows import first_mixed
from kdist.step.losses.loss_step import LossStep
from kdist.step.losses.step_rows import StepRows

_RELATED = (
    "The outputs of the model relate rows, by the operation {!r}: it takes the rows of each rank, where one process "
    "takes those of the global batch, and results differ. Fix: in the layer, take means and sums of "
    '`kdist.all_reduce(x, "mean")`, or rows of `kdist.all_gather(x)`'
)


class RelatedLayers:
    """Warns of layers as one that subtracts the mean over the rows. A layer that sends messages is left to the user.

    Args:
        step: the open step.
        rows: `StepRows` of the step.
    """

    def __init__(self, step: LossStep, rows: StepRows) -> None:
        self._step = step
        self._rows = rows

    def look_at(self, values: Any) -> None:
        """Warns, once a job, of what is found to relate rows.

        Args:
            values: structure of tensors and others that Keras' step passes to a compiled loss.
        """
        if self._step.engine.size == 1 or self._step.engine.rank != 0:
            return
        outputs = [each for each in keras.tree.flatten(values) if self._rows.is_of_rows(each)]
        if not outputs or self._rows.is_in_branch(outputs[0]):
            return
        found = self._rows.at_hand(outputs[0])
        mixed = None if found is None else first_mixed(found, outputs, self._rows.known())
        if mixed is not None:
            once.warning(_RELATED.format(mixed.name))
