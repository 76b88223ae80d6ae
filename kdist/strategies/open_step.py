"""What reductions, losses and metrics need of the step in which they are computed."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from kdist.engines.engine import Engine


class OpenStep(Protocol):
    """A training, test or predict step of a rank, while it is traced or run.

    Attributes:
        data: structure of tensors, the data of the user's step.
        share: `float64` scalar, this rank's share of the global batch's rows.
        weight: `float64` scalar, the weight of this rank's loss: the share, but with local SGD 1 or 0.
        active: `bool` scalar, whether this rank has rows.
        applying: bool, whether an optimizer applies gradients that are already reduced.
        loss_is_weighted: bool, whether the backward pass starts from the loss times the weight, so that gradients are
            this rank's terms.
    """

    data: Any
    share: tf.Tensor
    weight: tf.Tensor
    active: tf.Tensor
    applying: bool
    loss_is_weighted: bool

    @property
    def engine(self) -> Engine:
        """How the ranks of this step communicate; with local SGD each step has one rank."""

    def weighted(self, value: Any) -> Any:
        """Multiplies a value by this rank's weight; an idle rank's value is 0, even if it is NaN."""

    def per_share(self, value: tf.Tensor) -> tf.Tensor:
        """Divides a sum over this rank's rows by the weight, so that the weighted sum is the sum over all rows."""

    def may_differ(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor of this step's graph depends on the rank's rows, or may."""

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the rank's rows; eagerly, and where nothing is followed, `True`.

        Ranks that trace the step with other numbers of rows find the same.
        """

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """Returns whether the step is traced again, if its graph knows the number of its rows without that."""
