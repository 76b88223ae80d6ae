"""Metrics that a step updates by itself, with its rank's rows, or with what relates them, as a matrix of pairs does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.step.losses.custom_losses import CustomLosses
from kdist.strategies.global_batch import GlobalBatch
from kdist.strategies.open_step import OpenStep


class CustomMetrics:
    """Updates of metrics in an open step.

    Args:
        step: the open step.
        losses: `CustomLosses` of the step.
        batch: `GlobalBatch` of the step.
    """

    def __init__(self, step: OpenStep, losses: CustomLosses, batch: GlobalBatch) -> None:
        self._step = step
        self._losses = losses
        self._batch = batch

    def update_of_all(self, who: str, update: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Updates, on each rank, a metric that counts the global batch.

        Collective: every rank must call this, in the same order.

        Args:
            who: str, what the metric is, for messages.
            update: callable, its `update_state`.
            *args: what the step passes to it.
            **kwargs: the same.
        """
        of_all_ranks = self._losses.of_all_ranks((args, kwargs), who)
        if of_all_ranks is None:
            return self._batch.call(who, update, *args, **kwargs)
        args, kwargs = of_all_ranks
        with self._batch.in_call():
            return update(*args, **kwargs)

    def update_of_sums(self, who: str, update: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Updates a metric whose states are summed over the ranks: with what relates rows, on one rank.

        Collective: every rank must call this, in the same order.

        Args:
            who: see `update_of_all`.
            update: see `update_of_all`.
            *args: see `update_of_all`.
            **kwargs: see `update_of_all`.
        """
        of_all_ranks = self._losses.of_all_ranks((args, kwargs), who)
        if of_all_ranks is None:
            return update(*args, **kwargs)
        args, kwargs = of_all_ranks
        (have_rows,) = self._step.engine.allgather([tf.cast(self._step.active, tf.int32)[tf.newaxis]])
        is_first = tf.argmax(have_rows, output_type=tf.int32) == self._step.engine.rank  # of those that have rows

        def count() -> None:
            with self._batch.in_call():
                update(*args, **kwargs)

        tf.cond(is_first, count, lambda: None)
        return None
