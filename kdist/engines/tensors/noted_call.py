"""A collective or a message as it is noted for the failure detector, before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class NotedCall(NamedTuple):
    """A collective or a message, as it is noted for the failure detector: see `Activity.begin`.

    Attributes:
        kind: str.
        sent: list of pairs of a dtype and a shape, or `None` if they are known only when the arrays are there.
        num_fixed: int.
        peer: int or `None`, the only other rank that takes part.
    """

    kind: str
    sent: list[tuple[Any, Any]] | None
    num_fixed: int
    peer: int | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        fixed: Sequence[tf.Tensor | tf.TensorSpec] = (),
        free: Sequence[tf.Tensor] = (),
        peer: int | None = None,
    ) -> NotedCall:
        """Returns a call that sends `fixed`, of equal shapes on all ranks, and `free`, whose lengths may differ."""
        shapes = [*[each.shape for each in fixed], *[each.shape[1:] for each in free]]
        if not all(shape.is_fully_defined() for shape in shapes):
            return cls(kind, None, len(fixed), peer)
        sent = [(np.dtype(each.dtype.as_numpy_dtype), tuple(each.shape)) for each in (*fixed, *free)]
        return cls(kind, sent, len(fixed), peer)
