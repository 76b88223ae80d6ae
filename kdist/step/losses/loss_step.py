"""What losses by hand need of the step that computes them."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from kdist.engines.engine import Engine


class LossStep(Protocol):
    """The open step.

    Attributes:
        data: structure of tensors, the data of the user's step.
        weight: `float64` scalar, the weight of this rank's loss.
        share: `float64` scalar, this rank's share of the global batch's rows.
        active: `bool` scalar, whether this rank has rows.
        loss_is_weighted: bool, whether gradients are this rank's terms.
    """

    data: Any
    weight: tf.Tensor
    share: tf.Tensor
    active: tf.Tensor
    loss_is_weighted: bool

    @property
    def engine(self) -> Engine:
        """How the ranks of this step communicate."""

    def weighted(self, value: Any) -> Any:
        """Multiplies a value by this rank's weight; an idle rank's value is 0, even if it is NaN."""

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the rank's rows."""

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """Returns whether the step is traced again, if its graph knows the number of its rows without that."""
