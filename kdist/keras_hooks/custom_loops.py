"""A training loop of the user's own: its optimizers, its losses, and scopes of other strategies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from kdist._tf_internals import Strategy
from kdist.keras_hooks.patching import patched, watched

APPLY = ("apply", "apply_gradients")


def watch_optimizers(
    made: Callable[[keras.optimizers.Optimizer], None],
    used: Callable[[keras.optimizers.Optimizer, str], None],
    is_within: Callable[[], bool],
) -> contextlib.AbstractContextManager[None]:
    """Reports optimizers that are made or used while the context is open; see `watched`."""
    return watched(keras.optimizers.Optimizer, APPLY, made, used, is_within)


@contextlib.contextmanager
def whole_losses() -> Iterator[None]:
    """Makes losses that are called outside of a replica what they are in one process.

    Keras divides means by the number of replicas wherever the strategy's scope is open.
    """

    def in_replicas(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: value if tf.distribute.in_cross_replica_context() else scale(value)

    with contextlib.ExitStack() as stack:
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            stack.enter_context(patched(loss_module, name, in_replicas(getattr(loss_module, name))))
        yield


@contextlib.contextmanager
def watch_scopes(check: Callable[[tf.distribute.Strategy], None]) -> Iterator[None]:
    """Calls `check` with each strategy whose scope is about to be opened, while the context is open."""
    original = Strategy.scope

    @functools.wraps(original)
    def scope(self: tf.distribute.Strategy) -> Any:
        check(self)
        return original(self)

    with patched(Strategy, "scope", scope):
        yield
