"""The random states of Python, NumPy and PyTorch, read, set and broadcast; and what `tf.random` draws."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._tf_internals import random_ops, seeds_of_op
from kdist.engines.engine import Engine
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.random_seeds import global_seeds, set_global_seeds
from kdist.state.comparison import gather_values


def random_state() -> dict[str, Any]:
    """Returns the random states of Python, NumPy and, if it is imported, PyTorch, as JSON values."""
    torch = sys.modules.get("torch")
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": None if torch is None else torch.get_rng_state().tolist(),
    }


def set_random_state(states: Mapping[str, Any]) -> None:
    """Sets the states that `random_state` has returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch = sys.modules.get("torch")
    if torch is not None and states["torch"] is not None:
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))


def input_seed(state: str, number: int) -> int:
    """Returns the seed for the order of an input.

    It is computed from Python's random state, which `keras.utils.set_random_seed` sets, without a draw from it: a draw
    would change what the user's script draws later.
    """
    return int(hashlib.sha256(f"{state} {number}".encode()).hexdigest()[:7], 16)


def agree_random_state(engine: Engine) -> None:
    """Broadcasts rank 0's random states of Python, NumPy and, if it is imported, PyTorch.

    Collective: every rank must call this, in the same order.
    """
    root = engine.broadcast_object(random_state() if engine.rank == 0 else None)
    if engine.rank != 0:
        set_random_state(root)


def agree_global_seeds(engine: Engine) -> None:
    """Broadcasts rank 0's state of Keras' global seed generator.

    Collective: every rank must call this, in the same order.
    """
    root = engine.broadcast_object(global_seeds() if engine.rank == 0 else None)
    if root != global_seeds():
        set_global_seeds(root)


_NUM_KERNELS = 256


class AgreedDraws:
    """Makes eager ops of `tf.random` without a seed draw the same on all ranks, but for steps of a model.

    What the user has seeded draws as without kdist; the order of `tf.data` pipelines is not drawn here.

    Args:
        seed: int, equal on all ranks.

    Attributes:
        num_holding: int, how many models train on a generator that draws from Python's and NumPy's states.
        agreed: dict or `None`, the random states that the last call of `agree` has given to all ranks.
    """

    def __init__(self, seed: int = 0) -> None:
        self.num_holding = 0
        self.agreed: dict[str, Any] | None = None
        self._seed = seed
        self._num_draws = 0
        self._agreed_state: dict[str, Any] | None = None  # the last that rank 0 has sent

    def agree(self, engine: Engine, what: str, *, with_states: bool, given: Any = None) -> list[Any]:
        """Makes the draws equal again if one rank has drawn alone; by the same message, other states and values.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`, how the ranks communicate.
            what: str, what the ranks are doing, for the message if they do not do the same.
            with_states: bool, whether Python's, NumPy's and PyTorch's random states are rank 0's afterwards.
            given: anything that JSON can write.

        Returns:
            A list of what each rank has given.
        """
        sent = None
        if with_states and engine.rank == 0 and (state := random_state()) != self._agreed_state:
            sent = state
        # It raises if the ranks make different calls: nothing is agreed on then.
        gathered = gather_values(engine, what, [given, self._num_draws, with_states, sent])
        values, counts, (root_has_states, *_), (root, *_) = (list(each) for each in zip(*gathered, strict=True))
        if len(set(counts)) > 1:
            self._seed, self._num_draws = input_seed(str(self._seed), max(counts)), 0
        if engine.rank == 0:
            self._agreed_state = sent or self._agreed_state
        elif root_has_states:
            self._agreed_state = root or self._agreed_state
        self.agreed = self._agreed_state if with_states and root_has_states else None
        if engine.rank != 0 and self.agreed is not None:
            set_random_state(self.agreed)
        return values

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which ops draw so."""

        def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
            in_step = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
            return seeds_of_op(op_seed, None if in_step else self.next_seed)

        with patched(random_ops, "random_seed", types.SimpleNamespace(get_seed=get_seed)):
            yield

    def next_seed(self) -> int:
        """Returns a seed that is equal on all ranks if they call this equally often."""
        # TensorFlow keeps a kernel for each seed, which draws other numbers at each use: a few are enough.
        number, self._num_draws = self._num_draws % _NUM_KERNELS, self._num_draws + 1
        return input_seed(str(self._seed), number)


@contextlib.contextmanager
def folded_draws(rank: int, is_alike: Callable[[], bool], next_seed: Callable[[], int]) -> Iterator[None]:
    """A context in which seeded ops of `tf.random` draw other numbers on each rank, rank 0 those of one process.

    Args:
        rank: int.
        is_alike: callable that returns whether all ranks are to draw the same now.
        next_seed: callable that returns a seed for an op without any that draws so, equal on all ranks.
    """
    outer = random_ops.random_seed

    def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
        first, second = outer.get_seed(op_seed)
        if is_alike():
            return (first, second) if second is not None else outer.get_seed(next_seed())
        return first, second if second is None or rank == 0 else input_seed(str(second), rank)

    with patched(random_ops, "random_seed", types.SimpleNamespace(get_seed=get_seed)):
        yield
