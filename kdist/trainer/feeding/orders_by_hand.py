"""The orders of seeded `tf.data` shuffles that the user's own iterations have made: `fit` continues after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import (
    BY_HAND,
    GENERATOR,
    SKIPPED,
    resources_of,
    seeded_shuffles,
    with_inputs,
)
from kdist.data.pipelines.determinism import skip_orders, skip_orders_by_node
from kdist.data.pipelines.replay import orders_of


class OrdersByHand:
    """The orders that were made by hand of the datasets among a call's arguments.

    Args:
        arguments: mapping, the call's arguments.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._datasets = {name: value for name, value in arguments.items() if isinstance(value, tf.data.Dataset)}

    def made(self) -> dict[str, list[int]]:
        """Returns how many this rank has made, by argument, for each seeded shuffle."""
        return self._counts(BY_HAND)

    def skipped(self) -> dict[str, list[int]]:
        """Returns how many the call has skipped, by argument, for each seeded shuffle."""
        return self._counts(SKIPPED)

    def _counts(self, key: str) -> dict[str, list[int]]:
        counts = {
            name: [resources_of(each).get(key, 0) for each in seeded_shuffles(dataset)]
            for name, dataset in self._datasets.items()
        }
        return {name: numbers for name, numbers in counts.items() if any(numbers)}

    def skip(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Lets the datasets continue after some orders.

        Args:
            counts: mapping, what rank 0 has made or skipped: one rank may have iterated alone.
        """
        for name, numbers in counts.items():
            shuffles = seeded_shuffles(self._datasets[name]) if name in self._datasets else []
            for each, count in zip(shuffles, numbers, strict=False):
                kept = resources_of(each)
                if GENERATOR in kept:
                    skip_orders(orders_of(kept[GENERATOR]), count - kept.get(SKIPPED, 0))
                kept[SKIPPED] = max(count, kept.get(SKIPPED, 0))
        for dataset in self._datasets.values():
            for each in with_inputs(dataset):
                skip_orders_by_node(each)
