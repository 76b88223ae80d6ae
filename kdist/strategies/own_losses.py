"""What is said of losses that a step computes by hand, and that are no means over the rank's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist.data.batch import Rows
from kdist.engines.engine import Engine
from kdist.keras_hooks.losses import layer_that_added, recorded_added_losses
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_own_loss, layers_of
from kdist.reports.log import once
from kdist.state.graphs.row_means import RowMeans

_NO_MEAN = (
    "{} is computed from this rank's rows, and counts as a mean over them. It is none: it is a sum, relates rows, or "
    "is computed from means or sums, as of weights or a mask. Results differ from those of one process. Fix: compute "
    "it from rows of `kdist.all_gather`, or from means and sums of `kdist.all_reduce`"
)


class OwnStep(Protocol):
    """What losses by hand need of a step."""

    data: Any
    weight: tf.Tensor
    share: tf.Tensor

    @property
    def engine(self) -> Engine:
        """How the ranks of this step communicate."""

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the rank's rows."""


class OwnLosses:
    """Warns of what a step computes by hand from this rank's rows, and that is no mean over them.

    In eager steps, and in graphs of which nothing is found out, nothing is told.

    Args:
        step: the open step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._model = ""
        self._has_own_statistics = False
        self._checked: set[Any] = set()
        self._means: list[Any] = []
        self._told: list[Any] = []

    def note_mean(self, value: Any) -> None:
        """Says that a loss counts as a mean over the rank's rows, whatever it is computed by."""
        if tf.is_symbolic_tensor(value):
            self._checked.add(_key(value))
            self._means.append(value)

    def compiled(self, loss: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Returns a function whose results count as means, whatever they are computed by."""

        def call(*args: Any, **kwargs: Any) -> tf.Tensor:
            value = loss(*args, **kwargs)
            self.note_mean(value)
            return value

        return call

    @contextlib.contextmanager
    def opened(self, model: keras.Model) -> Iterator[None]:
        """A context in which a model's step computes its losses."""
        self._model = type(model).__name__
        # Such a layer relates the rank's rows, of which the log tells.
        self._has_own_statistics = any(isinstance(each, keras.layers.BatchNormalization) for each in layers_of(model))
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                recorded_added_losses(model, lambda loss, total: self.check(total, layer_that_added(model, loss)))
            )
            if computes_own_loss(model):
                stack.enter_context(self._checked_gradients())
            yield

    @contextlib.contextmanager
    def _checked_gradients(self) -> Iterator[None]:
        original = tf.GradientTape.gradient

        def gradient(
            tape: tf.GradientTape, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            are_weights = [isinstance(each, (tf.Variable, keras.Variable)) for each in tf.nest.flatten(sources)]
            if all(are_weights) and output_gradients is None:
                for each in tf.nest.flatten(target):
                    self.check(each, f"The loss that the step of {self._model} differentiates")
            return original(tape, target, sources, output_gradients, *args, **kwargs)

        with patched(tf.GradientTape, "gradient", gradient):
            yield

    def check(self, value: Any, who: str) -> None:
        """Warns of a number of the graph that counts as a mean over the rank's rows, and is none.

        Args:
            value: tensor or number.
            who: str, what it is.
        """
        if not self._is_followed(value) or _key(value) in self._checked:
            return
        self._checked.add(_key(value))
        is_alone = self._step.engine.size == 1  # as with local SGD
        if is_alone or self._has_own_statistics or self._step.engine.rank != 0:
            return
        rows = Rows(self._step.data)
        leaves = [
            (leaf, rows.has_rows(place))
            for place, leaf in enumerate(tf.nest.flatten(self._step.data))
            if leaf is not None
        ]
        with_rows = [place for place, (_, has_rows) in enumerate(leaves) if has_rows]
        means = [*self._means, self._step.weight, self._step.share]
        found = RowMeans([leaf for leaf, _ in leaves], with_rows)
        # What is computed from one that was told of is no news; and a sum that is divided by its rows is a mean.
        if all(found.is_mean(value, fixed) is False for fixed in (means, [*means, *self._told])):
            self._told.append(value)
            once.warning(_NO_MEAN.format(who))

    def _is_followed(self, value: Any) -> bool:
        return tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor) and self._step.depends_on_rows(value)


def _key(value: Any) -> Any:
    return value.graph, value.name
