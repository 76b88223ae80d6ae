"""Counts what a step gathers of the rows of all ranks: for `kdist.all_gather`, and for losses and metrics of these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.keras_hooks.losses import get_keras_mask, is_reduced_per_row, replaced_losses
from kdist.keras_hooks.metrics import wrapped_updates
from kdist.keras_hooks.patching import patched
from kdist.planning.first_call import FirstCall
from kdist.planning.rows import repeated
from kdist.strategies.collectives import gathers_noted

_STEPS = ("train_step", "test_step", "predict_step")


class Gathers:
    """The tensors of a step of one process that several ranks would gather."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._of_losses: dict[int, Any] = {}  # each is gathered once for all losses and metrics

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them; of those of unknown shapes none."""
        return sum(map(_bytes, [*self._values, *self._of_losses.values()]))

    def clear(self) -> None:
        """Forgets what was noted, as a step begins."""
        self._values.clear()
        self._of_losses.clear()

    def note(self, values: Any) -> None:
        """Notes what `kdist.all_gather` is given.

        Args:
            values: nested tensors.
        """
        self._values += keras.tree.flatten(values)

    def call(self, who: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Notes what a function of the rows of all ranks is given, and calls it; see `GlobalBatch.call`."""
        del who
        for leaf in keras.tree.flatten((args, kwargs)):
            mask = get_keras_mask(leaf)
            self._of_losses |= {id(each): each for each in (leaf, mask) if each is not None}
        return function(*args, **kwargs)


@contextlib.contextmanager
def counted_gathers(model: keras.Model) -> Iterator[Gathers]:
    """Counts what a model's last step gathers, as it is traced or runs eagerly, while the context is open.

    Args:
        model: `keras.Model`.
    """
    gathers = Gathers()

    def begun(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def clear_and_run(data: Any) -> Any:
            gathers.clear()  # a first trace that makes variables is followed by another
            return step(data)

        return clear_and_run

    def counted(loss: Any) -> Callable[..., Any]:
        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if is_reduced_per_row(loss, y_pred):
                return loss(y_true, y_pred, sample_weight)
            return gathers.call("loss", loss, y_true, y_pred, sample_weight)

        return call

    with contextlib.ExitStack() as stack:
        for name in _STEPS:
            stack.enter_context(patched(model, name, begun(getattr(model, name))))
        stack.enter_context(replaced_losses(model, counted))
        stack.enter_context(wrapped_updates(model, gathers.call, call_rows=gathers.call))
        stack.enter_context(gathers_noted(gathers.note))
        yield gathers


def traced_gathers(call: FirstCall) -> int:
    """Returns the bytes of what a step of one row gathers, from the graph of one that updates no weights.

    Args:
        call: `FirstCall`.
    """
    name = "predict_step" if call.method.startswith("predict") else "test_step"
    batch = tf.nest.map_structure(lambda each: repeated(each, 1), call.batch)
    specs = tf.nest.map_structure(lambda each: each if each is None else tf.type_spec_from_value(each), batch)
    with counted_gathers(call.model) as gathers, contextlib.suppress(Exception):  # a model may only have a `train_step`
        tf.function(getattr(call.model, name)).get_concrete_function(specs)
    return gathers.num_bytes


def _bytes(leaf: Any) -> int:
    found = 0
    for each in tf.nest.flatten(leaf, expand_composites=True):
        if tf.is_tensor(each) or isinstance(each, np.ndarray):
            shape = tf.TensorShape(each.shape)
            found += (shape.num_elements() or 0) * tf.as_dtype(each.dtype).size if shape.rank else 0
    return found
