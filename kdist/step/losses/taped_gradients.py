"""Gradients that a step takes from tapes of its own: those whose mean over the ranks is that of the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import is_used_up, recorded_elements
from kdist.keras_hooks.patching import patched
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.rows.reduction_frontier import is_computed_of
from kdist.step.losses.scaled_sums import ScaledSums
from kdist.step.losses.step_gradients import StepGradients
from kdist.step.losses.step_numbers import StepNumbers
from kdist.step.losses.step_rows import Means, StepRows
from kdist.strategies.open_step import OpenStep

_AS_MEAN = (
    "The step of {} differentiates a number that is no mean over this rank's rows, with `output_gradients=`, or by "
    "other sources beside weights. Its gradients count as those of a mean, and results differ from those of one "
    "process. Fix: `tape.gradient(loss, weights)`, and another tape for the other sources"
)
_BY_ROWS = (
    "The step of {} differentiates by its rows a number that it computes from a loss of `compile` otherwise than by a "
    "factor. The gradients have the scale of this rank's rows, and results differ from those of one process. Fix: "
    'differentiate the loss, and multiply by what `kdist.all_reduce(loss, "mean")` makes of the rest'
)
_MAX_ELEMENTS = 64  # of what `jacobian` differentiates, one after the other


class TapedGradients:
    """What `tf.GradientTape` differentiates in a step in the place of the numbers that it is given.

    Args:
        step: the open step.
        rows: `StepRows` of the step.
        numbers: `StepNumbers` of the step.
        gradients: `StepGradients` of the step, which gets to know what is returned.

    Attributes:
        means: dict, by their keys, of numbers whose gradients are those of means, whatever the numbers are.
    """

    def __init__(self, step: OpenStep, rows: StepRows, numbers: StepNumbers, gradients: StepGradients) -> None:
        self._step = step
        self._rows = rows
        self._numbers = numbers
        self._gradients = gradients
        self._model = self._loss = ""
        self._by_rows: set[Any] = set()  # keys of gradients by rows that are parts of those of all ranks
        self.means: Means = {}

    @contextlib.contextmanager
    def patched(self, model: str, loss: str) -> Iterator[None]:
        """A context in which tapes return such gradients.

        Collective: in it every rank must ask tapes for gradients in the same order.

        Args:
            model: str, the model's class, for messages.
            loss: str, what the step differentiates, for messages.
        """
        self._model, self._loss = model, loss
        tape = tf.GradientTape
        own_gradient, own_jacobian, own_stop = tape.gradient, tape.jacobian, tape.stop_recording

        def gradient(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return self._gradient(own_gradient, tape, target, sources, *args, **kwargs)

        def jacobian(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return self._jacobian(own_jacobian, own_gradient, tape, target, sources, *args, **kwargs)

        @contextlib.contextmanager
        def stop_recording(tape: tf.GradientTape) -> Iterator[None]:
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            try:
                with own_stop(tape):
                    yield
            finally:
                made = [output for each in graph.get_operations()[start:] for output in each.outputs]
                self._numbers.unrecorded.update({tensor_key(each): each for each in made})

        with (
            patched(tf.GradientTape, "gradient", gradient),
            patched(tf.GradientTape, "jacobian", jacobian),
            patched(tf.GradientTape, "stop_recording", stop_recording),
        ):
            yield

    def _gradient(
        self,
        original: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        targets = tf.nest.flatten(target)
        if any(map(self._rows.is_in_vectorized_loop, targets)):  # of one row, or of one element of a `jacobian`
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        are_weights = list(map(_is_weight, tf.nest.flatten(sources)))
        if all(are_weights) and output_gradients is None:
            target, output_gradients = self._targets(targets) or (target, None)
            gradients = original(tape, target, sources, output_gradients, *args, **kwargs)
            self._gradients.note(tf.nest.flatten(gradients))
            return gradients
        return self._by_other_sources(original, tape, target, sources, output_gradients, *args, **kwargs)

    def _by_other_sources(
        self,
        original: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns gradients by the step's rows, too, or by what is computed of them.

        Collective: every rank must call this, in the same order.
        """
        targets, are_weights = tf.nest.flatten(target), list(map(_is_weight, tf.nest.flatten(sources)))
        parts = [part for each in targets for part in self._numbers.parts(each)] if output_gradients is None else []
        are_means = {is_mean for _, _, is_mean in parts}
        if any(are_weights):
            scalars = [each for each in targets if tf.is_tensor(each) and each.shape.rank == 0]
            if len(are_means) > 1 or any(self._numbers.find(each, self._loss, self.means) for each in scalars):
                self._numbers.warn(_AS_MEAN, self._model)
        elif None in are_means:
            self._numbers.warn(_BY_ROWS, self._model)
        elif len(are_means) > 1:
            factors = [
                (tf.fill(tf.shape(each), tf.cast(factor, each.dtype)), is_mean) for each, factor, is_mean in parts
            ]
            by = [self._step.weighted(factor) if is_mean else factor for factor, is_mean in factors]
            gradients = original(tape, [tensor for tensor, _, _ in parts], sources, by, *args, **kwargs)
            return tf.nest.map_structure(self._of_all_rows, gradients)
        upstream = [each for each in tf.nest.flatten(output_gradients) if self._rows.is_of_rows(each)]
        is_chained = any(is_computed_of(each, self._by_rows) for each in upstream)
        gradients = original(tape, target, sources, output_gradients, *args, **kwargs)
        made: list[Any] = []
        for source, each in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            if each is not None and are_means == {True} and self._rows.is_of_rows(source):
                made.append(self._of_all_rows(self._step.weighted(each)))
            elif each is not None and is_chained:  # a sum over the ranks is to be a mean, or to stay noted
                made.append(self._per_share(each) if _is_weight(source) else self._of_all_rows(each))
            else:
                made.append(each)
        if are_means == {True} or is_chained:
            self._gradients.note([each for each, is_weight in zip(made, are_weights, strict=True) if is_weight])
        return tf.nest.pack_sequence_as(sources, made)

    def _of_all_rows(self, gradient: Any) -> Any:
        """Notes a gradient by this rank's rows that is a part of that of the mean over all rows."""
        if isinstance(gradient, tf.Tensor):
            self._by_rows.add(tensor_key(gradient))
        return gradient

    def _per_share(self, gradient: Any) -> Any:
        """Returns a term of a sum over the ranks as this rank's part of their mean by rows."""
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = tf.math.divide_no_nan(values, tf.cast(self._step.weight, values.dtype))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values

    def _jacobian(
        self,
        original: Callable[..., Any],
        gradient: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns the gradients of several losses, each as `gradient` returns that of one.

        If the target has a loss for each row, they are those of this rank's rows.

        Collective: every rank must call this, in the same order.
        """
        flat = tf.nest.flatten(sources)
        if not all(map(_is_weight, flat)) or is_used_up(tape) or not self._is_of_losses(target):
            return original(tape, target, sources, unconnected_gradients, *args, **kwargs)
        losses = [[each] for each in recorded_elements(tape, target)]
        targets = [self._targets(each) or (each, [tf.ones_like(each[0])]) for each in losses]
        are_found: list[bool] = []

        def gradients_of(place: tf.Tensor) -> list[tf.Tensor]:
            by = [tf.where(place == other, each, 0) for other, (_, all_by) in enumerate(targets) for each in all_by]
            tensors = [each for some, _ in targets for each in some]
            found = gradient(tape, tensors, flat, by, unconnected_gradients)
            are_found[:] = [each is not None for each in found]
            return [place, *(tf.convert_to_tensor(each) for each in found if each is not None)]

        _, *stacked = tf.vectorized_map(gradients_of, tf.range(len(losses)))
        of_losses = iter(stacked)
        made = [
            tf.reshape(next(of_losses), [*target.shape, *source.shape]) if is_found else None
            for source, is_found in zip(flat, are_found, strict=True)
        ]
        self._gradients.note(made)
        return tf.nest.pack_sequence_as(sources, made)

    def _is_of_losses(self, target: Any) -> bool:
        """Returns whether a tensor has losses of the batch as its elements, and not one for each row."""
        is_of_all = self._step.engine.size == 1 or not self._rows.is_of_rows(target)
        if is_of_all or self._rows.is_in_vectorized_loop(target):
            return False
        if not 0 < (target.shape.num_elements() or 0) <= _MAX_ELEMENTS:
            return False
        # Where the number of rows is known, nothing tells losses from rows.
        return self._rows.of(target) is not None and self._rows.row_wise(target) is not None

    def _targets(self, targets: list[Any]) -> tuple[list[Any], list[tf.Tensor]] | None:
        """Returns what is differentiated in the place of targets, and by which gradients; `None` for as they are.

        Collective: every rank must call this, in the same order.
        """
        found = [self._numbers.find(each, self._loss, self.means) for each in targets]
        if not any(found) or not all(isinstance(each, tf.Tensor) for each in targets):
            return None
        scaled = []
        for each, own in zip(targets, found, strict=True):
            scaled += (own or ScaledSums(self._step.weight, ())).targets(each)
        return [each for each, _ in scaled], [by for _, by in scaled]


def _is_weight(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))
