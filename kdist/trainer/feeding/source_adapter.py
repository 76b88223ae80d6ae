"""A rank's source of data as what Keras takes for one of its own data adapters."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.batch import Shard
from kdist.data.source import Source
from kdist.keras_hooks.fit.data_adapters import DataAdapter
from kdist.state.random_state import random_state, set_random_state


class SourceAdapter(DataAdapter):
    """A source as Keras' `DataAdapter`.

    Args:
        source: `Source`, this rank's shards.
        before_hook: callable, runs on all ranks before the source's epoch hooks, which may shuffle: it returns the
            random states for them, or `None`.
        is_for_training: bool, whether `fit` trains on the data: each of its epochs begins with it, whatever the data.

    Attributes:
        hooks: list of tuples `(name, states)`, which of the user's hooks were called, and the compressed random states
            at that time. Each epoch of a training adds two.
    """

    def __init__(self, source: Source, before_hook: Callable[[], Any], *, is_for_training: bool = True) -> None:
        self.source = source
        self.is_for_training = is_for_training
        self._before_hook = before_hook
        self.hooks: list[tuple[str, bytes]] = []

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Returns a dataset of `Shard`; one pass over it is an epoch."""
        dataset = self.source.dataset()
        if self.source.knows_global_rows:
            return dataset
        # With `()` for the number, steps with it and without it are two traces.
        return dataset.map(lambda shard: Shard(shard.data, shard.rows, ()))

    @functools.cached_property
    def fingerprint(self) -> list[str]:
        """A summary of some of the user's input; see `Source.fingerprint`."""
        return self.source.fingerprint()

    @property
    def num_batches(self) -> int | None:
        """The number of steps of an epoch; `None` if unknown."""
        return self.source.num_steps

    @property
    def batch_size(self) -> int | None:
        """`None`: a step's rows are in its `Shard`."""
        return None

    def on_epoch_begin(self) -> None:
        """Calls the source's hook before an epoch."""
        self._call("on_epoch_begin")

    def on_epoch_end(self) -> None:
        """Calls the source's hook after an epoch."""
        self._call("on_epoch_end")

    def _call(self, name: str) -> None:
        source, states = self.source, None
        must_agree = self.is_for_training and name == "on_epoch_begin"
        # Where each rank has data of its own, only some may have hooks.
        if must_agree or source.has_hooks or source.draws_in_background or source.has_uneven_shards:
            states = self._before_hook()
        # Not without a hook: what loads may wait for something that comes later.
        with source.holding_loaders() if source.has_hooks else contextlib.nullcontext():
            if source.has_hooks:
                if states is not None:  # what the user loads in the background may have drawn since
                    set_random_state(states)
                if self.is_for_training:
                    self.hooks.append((name, zlib.compress(json.dumps(random_state()).encode())))
            getattr(source, name)()

    def repeat_hooks(self, hooks: list[tuple[str, bytes]]) -> None:
        """Calls the user's hooks as they were called before an interruption, with the same random states.

        Args:
            hooks: list as in `hooks`, from the beginning of `fit`.
        """
        for name, states in hooks[len(self.hooks) :]:
            set_random_state(json.loads(zlib.decompress(states)))
            self.source.repeat_hook(name)
        self.hooks = list(hooks)
