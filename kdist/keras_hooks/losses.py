"""Keras' compiled losses: those with a value per row, masks, denominators, regularizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank

from kdist.keras_hooks.metrics import is_per_row
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import layers_of


@contextlib.contextmanager
def replaced_losses(model: keras.Model, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces each compiled loss by `wrap(loss)` while the context is open."""
    compile_loss = model._compile_loss
    if compile_loss is None:
        yield
        return
    entries = compile_loss._flat_losses
    build = compile_loss.build

    def replace() -> None:
        compile_loss._flat_losses = [entry._replace(loss=wrap(entry.loss)) for entry in entries]

    def build_and_replace(*args: Any, **kwargs: Any) -> None:
        nonlocal entries
        build(*args, **kwargs)
        entries = compile_loss._flat_losses
        replace()

    if entries:
        replace()
    with patched(compile_loss, "build", build_and_replace):  # the first step may build it
        try:
            yield
        finally:
            compile_loss._flat_losses = entries


def is_reduced_per_row(loss: Any, y_pred: Any) -> bool:
    """Returns whether a compiled loss is a `keras.losses` class that reduces values, each of one row.

    Of all others, `Dice` and `Circle`, and what a user writes, nothing is known.

    Args:
        loss: a loss of the compiled model.
        y_pred: predictions; Keras' losses take the mean over all rows of predictions of shape `(batch_size,)`.
    """
    return (
        type(loss).__module__ == keras.losses.MeanSquaredError.__module__
        and not {"call", "__call__"} & set(vars(loss))
        and is_per_row(getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {}))
        and all(leaf.shape.rank != 1 for leaf in keras.tree.flatten(y_pred))
    )


@contextlib.contextmanager
def scaled_activity_losses(model: keras.Model, scaled: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Applies a function to the results of Keras' activity regularizers where these are sums over rows.

    Keras 3.14 and later divide by the number of rows. A custom regularizer may do either, and is not changed.
    """
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) >= (3, 14):
        yield
        return
    own = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    layers = [each for each in layers_of(model) if type(getattr(each, "activity_regularizer", None)) in own]

    def around(regularizer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda output: scaled(regularizer(output))

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patched(layer, "activity_regularizer", around(layer.activity_regularizer)))
        yield


@contextlib.contextmanager
def scaled_added_losses(model: keras.Model, scaled: Callable[[Any, tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Adds `scaled(loss, total)` in the place of each total of an `add_loss` or a regularizer, in an open context."""
    aggregate = model._aggregate_additional_loss
    with patched(model, "_aggregate_additional_loss", lambda loss: scaled(loss, aggregate(loss))):
        yield


def layer_that_added(model: keras.Model, loss: Any) -> str:
    """Returns what a loss among those of a model's layers is, for messages."""
    layers = [each for each in layers_of(model) if any(loss is own for own in each._losses)]
    return f"A loss of the layer {layers[0].name!r} (`add_loss`)" if layers else "An added loss"


@contextlib.contextmanager
def recorded_masks(loss: keras.losses.Loss) -> Iterator[list[Any]]:
    """Records the mask of a loss's unreduced values (from `ignore_class`), or `None`, at each call.

    Yields:
        The list of masks.
    """
    masks: list[Any] = []
    original = loss.call

    def call(*args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        masks.append(get_keras_mask(values))
        return values

    with patched(loss, "call", call):
        yield masks


def unreduced(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the numerator and the denominator of a loss whose reduction is a mean, scalar tensors.

    Args:
        loss: a loss with `reduction` one of `"sum_over_batch_size"`, `"mean"`, `"mean_with_sample_weight"`.
        y_true: targets, as in a call of the loss.
        y_pred: predictions, as in a call of the loss; the Keras masks of these and of the loss are applied.
        sample_weight: weights, as in a call of the loss, or `None`.
    """
    reduction = loss.reduction
    with patched(loss, "reduction", "none"), recorded_masks(loss) as masks:
        values = loss(y_true, y_pred, sample_weight)
    masks.append(get_keras_mask(y_pred))
    masks = [each for each in masks if each is not None]
    mask = functools.reduce(tf.logical_and, masks) if masks else None
    count = tf.cast(tf.size(values), values.dtype)
    if reduction != "mean_with_sample_weight":
        if mask is not None:
            count *= tf.reduce_mean(tf.cast(mask, values.dtype))
    elif sample_weight is not None or mask is not None:
        if sample_weight is not None:
            sample_weight = tf.cast(tf.convert_to_tensor(sample_weight), values.dtype)
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
        weight = apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
        _, weight = squeeze_or_expand_to_same_rank(values, weight)
        count = tf.reduce_sum(tf.cast(weight, values.dtype))
    return tf.reduce_sum(values), count
