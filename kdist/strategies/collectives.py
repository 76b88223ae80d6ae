"""The collectives that a model, a loss or a training step may call: `kdist.all_gather` and `kdist.all_reduce`."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from kdist._user_code import user_line
from kdist.cluster import detect
from kdist.reports.log import once
from kdist.reports.scope_marks import own_scopes
from kdist.strategies.all_reduce import AllReduceExtended, AllReduceStrategy
from kdist.strategies.differentiable import rows_of_all_ranks, sum_over_ranks

_strategy_of_method: contextvars.ContextVar[AllReduceStrategy | None] = contextvars.ContextVar(
    "kdist.running_method", default=None
)
_note: contextvars.ContextVar[Callable[[Any], None] | None] = contextvars.ContextVar("kdist.all_gather", default=None)


def all_gather(x: Any) -> Any:
    """Concatenates the rows of all ranks, in the order of the global batch.

    In one process, and with a strategy other than synchronous all-reduce, the result is `x`. Outside of a scope it
    is, too, with a warning; callbacks of a model that was made in a scope need no open one.

    Gradients pass through: this rank's rows get the gradients of the losses of all ranks. So a loss that relates the
    rows of a batch to each other is exact where it is computed from the gathered rows.

    In `fit`, `evaluate` and `predict` a rank without rows in a step adds none. Outside of these each rank adds all rows
    of its `x`.

    Collective: every rank must call this, in the same order.

    Args:
        x: tensor of shape `(rows, ...)` of numbers, `bool` or strings, or a nested structure of such tensors, and of
            `None`, which stays. The number of rows may differ between the ranks; the other dimensions may not.

    Returns:
        A structure like `x`. Its tensors have the shape `(rows of all ranks, ...)`, and are equal on all ranks.

    Raises:
        EngineError: if a tensor is a scalar, or its dtype cannot be sent.

    Example:
    ```python
    class Contrastive(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            images, texts = kdist.all_gather(y_pred)
            return contrastive_loss(images, texts)
    ```

    References:
        - [Chen et al., 2020](https://arxiv.org/abs/2002.05709), which gathers the negatives of all replicas.
    """
    extended = _extended("kdist.all_gather")
    if extended is None:
        if (note := _note.get()) is not None:
            note(x)
        return x
    return _with_tensors(x, rows_of_all_ranks(extended.engine, extended.step, _tensors(x)))


def all_reduce(x: Any, op: Literal["sum", "mean", "max", "min"] = "sum") -> Any:
    """Combines the values of all ranks, element by element.

    In one process, and with a strategy other than synchronous all-reduce, the result is `x`. Outside of a scope it
    is, too, with a warning; callbacks of a model that was made in a scope need no open one.

    Gradients pass through: the `x` of this rank gets the gradients of the losses of all ranks.

    In `fit`, `evaluate` and `predict` a rank without rows in a step takes no part. `"mean"` weights each rank by its
    number of rows: the mean of the ranks' means over their rows is the mean over the rows of the global batch. Outside
    of these each rank counts once.

    Collective: every rank must call this, in the same order.

    Args:
        x: tensor of integer, float or complex dtype, or a nested structure of such tensors, and of `None`, which stays.
            Shapes and dtypes must be equal on all ranks.
        op: str, `"sum"`, `"mean"`, `"max"` or `"min"`.

    Returns:
        A structure like `x`. Its tensors are equal on all ranks; means of integers are floats.

    Raises:
        ValueError: if `op` is another one.
        EngineError: if a dtype cannot be summed.

    Example:
    ```python
    class GlobalNorm(keras.layers.Layer):
        def call(self, x):
            mean = kdist.all_reduce(keras.ops.mean(x, axis=0), "mean")
            return x - mean
    ```
    """
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(
            f"all_reduce has no such operation. Received: op={op!r}. Expected 'sum', 'mean', 'max' or 'min'. Fix: "
            "choose one of these."
        )
    extended = _extended("kdist.all_reduce")
    if extended is None:
        return x
    engine, step = extended.engine, extended.step
    tensors = _tensors(x)
    if op in ("max", "min"):
        reduce = tf.reduce_max if op == "max" else tf.reduce_min
        gathered = rows_of_all_ranks(engine, step, [tensor[tf.newaxis] for tensor in tensors])
        combined = [reduce(rows, axis=0) for rows in gathered]
    else:
        if op == "mean":
            share = 1 / extended.num_replicas if step is None else step.weight
            tensors = [
                x if x.dtype.is_floating or x.dtype.is_complex else tf.cast(x, keras.config.floatx()) for x in tensors
            ]
            tensors = [x * tf.cast(share, x.dtype) for x in tensors]
        combined = sum_over_ranks(engine, step, tensors)
    return _with_tensors(x, combined)


def _tensors(x: Any) -> list[tf.Tensor]:
    """Returns the tensors of a structure, in which `None` may stand, as for a gradient that there is not."""
    return [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(x) if leaf is not None]


def _with_tensors(x: Any, tensors: list[tf.Tensor]) -> Any:
    """Returns a structure like `x`, of which each but `None` is replaced."""
    new = iter(tensors)
    return keras.tree.pack_sequence_as(x, [None if leaf is None else next(new) for leaf in keras.tree.flatten(x)])


@contextlib.contextmanager
def gathers_noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Calls a function with what `all_gather` is given in one process, while the context is open."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


@contextlib.contextmanager
def running_method(strategy: AllReduceStrategy) -> Iterator[None]:
    """A context while a method of a model runs: its callbacks are of all ranks, also if the scope has been left."""
    token = _strategy_of_method.set(strategy)
    try:
        yield
    finally:
        _strategy_of_method.reset(token)


def _extended(name: str) -> AllReduceExtended | None:
    """Returns the extended strategy of the context if several ranks take part, else `None`.

    Warns if a scope is missing.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() and tf.executing_eagerly():
        strategy = _strategy_of_method.get() or strategy
        if not isinstance(strategy, AllReduceStrategy) and _scope_is_missing():
            once.warning(
                f"{name} is called outside of kdist.scope(), and each rank gets its own value. Received: a call in "
                f"{user_line()}. Expected one in a scope, or in a callback of a model of a scope. Fix: move the line "
                "into `with kdist.scope():`."
            )
    if not isinstance(strategy, AllReduceStrategy) or strategy.extended.num_replicas == 1:
        return None
    return strategy.extended


def _scope_is_missing() -> bool:
    """Returns whether this is one of several ranks that train together, outside of a scope."""
    if own_scopes.is_open or own_scopes.trains_alone:
        return False
    info = detect(os.environ)
    return info.size > 1 and not info.cluster_spec.get("ps")
