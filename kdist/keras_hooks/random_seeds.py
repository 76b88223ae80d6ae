"""Keras' seed generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.random import _cast_seed
from keras.src.random.seed_generator import draw_seed

from kdist.keras_hooks.patching import patched

_GLOBAL = "global_seed_generator"


def global_seeds() -> list[int] | None:
    """Returns the state of Keras' global seed generator; `None` if nothing has used it yet."""
    generator = global_state.get_global_attribute(_GLOBAL)
    return None if generator is None else keras.ops.convert_to_numpy(generator.state).tolist()


def set_global_seeds(state: list[int] | None) -> None:
    """Sets the state of Keras' global seed generator; with `None` its first use makes a new one."""
    generator = None if state is None else keras.random.SeedGenerator(0)
    if generator is not None:
        generator.state.assign(state)
    global_state.set_global_attribute(_GLOBAL, generator)


def drawn_seed(seed: Any) -> tf.Tensor:
    """Returns the seed that Keras gives TensorFlow's stateless operations for one of its own: two `int32`."""
    return _cast_seed(draw_seed(seed))


@contextlib.contextmanager
def folded_seeds(
    generators: Sequence[keras.random.SeedGenerator], rank: int, is_alike: Callable[[], bool]
) -> Iterator[None]:
    """Folds the rank into the seeds that `next` returns, so that ranks with equal states draw different numbers.

    Args:
        generators: sequence of `keras.random.SeedGenerator`.
        rank: int.
        is_alike: callable that returns whether all ranks are to draw the same now.
    """
    offset = rank * 0x9E3779B1 % (2**31 - 1)  # distant for adjacent ranks

    def folded(generator: keras.random.SeedGenerator) -> Callable[..., tf.Tensor]:
        def next_seed(ordered: bool = True) -> tf.Tensor:
            seed = type(generator).next(generator, ordered=ordered)
            return seed if is_alike() else seed + tf.constant([offset, 0], seed.dtype)

        return next_seed

    with contextlib.ExitStack() as stack:
        for generator in generators:
            stack.enter_context(patched(generator, "next", folded(generator)))
        yield
