"""A rank's pipeline in another order: only its operations are made again, its functions stay as they were traced."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from kdist.data.graphs.dataset_internals import inputs, kind, resources_of
from kdist.data.graphs.own_functions import is_mapped, mapped_again
from kdist.data.pipelines.pipeline import APPLIED, Pipeline
from kdist.data.pipelines.replay import can_be_replayed, replay


class Chain(NamedTuple):
    """The operations of a rank's pipeline from the first one on that has another order with another seed.

    Attributes:
        base: `tf.data.Dataset`, what comes before them.
        links: list, in the order of the data: the position of a step of the user's that is applied, or a dataset whose
            last operation is.
    """

    base: tf.data.Dataset
    links: list[Any]

    def in_order_of(self, user_dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
        """Returns the rank's pipeline in the order of another seed.

        Args:
            user_dataset: `tf.data.Dataset`, the same that the pipeline was made of.
            seed: int, as for `Pipeline`.
        """
        dataset = self.base
        pipeline = Pipeline(user_dataset, seed) if self.links else None
        for link in self.links:
            if pipeline and isinstance(link, int):
                dataset = pipeline.apply(link, dataset)
            elif is_mapped(link):
                dataset = mapped_again(link, dataset)
            elif kind(link) == "Concatenate":  # with what fills the last group
                dataset = dataset.concatenate(inputs(link)[1])
            else:
                dataset = replay(link, dataset)
        return dataset


def chain_of(dataset: tf.data.Dataset, pipeline: Pipeline | None) -> Chain | None:
    """Returns the operations of a rank's pipeline; `None` where not all of them can be made again.

    Args:
        dataset: `tf.data.Dataset`, the rank's pipeline.
        pipeline: `Pipeline` that it was made of; `None` if it has the order of the user's.
    """
    if pipeline is None or not pipeline.depends_on_seed:
        return Chain(dataset, [])
    if pipeline.is_base_rewritten:
        return None
    base, num_links = dataset, 0
    links: list[Any] = []
    while True:
        below = inputs(dataset)
        if applied := resources_of(dataset).get(APPLIED):
            link, dataset = applied
            if kind(pipeline.steps[link]) == "Cache":  # which holds data as long as it is kept
                return None
            base, num_links = dataset, len(links) + 1
        elif not below:
            return Chain(base, links[:num_links][::-1])
        elif not (can_be_replayed(dataset) or is_mapped(dataset) or kind(dataset) == "Concatenate"):
            return None
        else:
            link, dataset = dataset, below[0]
        links.append(link)
