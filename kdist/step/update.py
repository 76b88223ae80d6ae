"""The update pipeline: the stages between a step's gradients and the optimizer's update, in one visible order."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import innermost, trained_variables
from kdist.keras_hooks.patching import patched
from kdist.step.step import Step

PHASES = ("weigh", "inspect local", "reduce", "inspect reduced", "scale rate", "update")
"""The order of all stages. Keras' own `apply` comes after the last."""

Terms = Callable[[Sequence[Any]], list[Any]]
OptimizerUpdate = tuple[keras.optimizers.Optimizer, list[Any]]  # and the variables that it updates


@dataclasses.dataclass
class Update:
    """One update of one optimizer, which the stages change in place.

    Attributes:
        optimizer: `keras.optimizers.Optimizer`, the outermost one.
        variables: list of the variables to update.
        gradients: list of tensors, `tf.IndexedSlices` and `None`, one for each variable.
        step: `Step` of a rank, or `None` in one process.
        local: list, the gradients as this rank has computed them.
        terms: callable that returns this rank's terms in the sum over the ranks for some gradients. It is called
            for each message, so that the first message need not wait for the last gradient.
    """

    optimizer: keras.optimizers.Optimizer
    variables: list[Any]
    gradients: list[Any]
    step: Step | None = None
    local: list[Any] = dataclasses.field(init=False)
    terms: Terms = list

    def __post_init__(self) -> None:
        self.local = self.gradients


class Stage(abc.ABC):
    """One stage of the pipeline.

    Attributes:
        phase: str, one of `PHASES`; stages of one phase run in the order in which they were added.
    """

    phase: str

    @abc.abstractmethod
    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Processes an update and calls the next stages.

        Args:
            update: `Update`, changed in place.
            proceed: callable that runs the later stages and the optimizer's own update, and returns its result.
        """

    @contextlib.contextmanager
    def opened(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """A context that is open with the pipeline of an optimizer, for patches before its update."""
        yield


class UpdatePipeline:
    """The stages of all updates of one step, run by one wrapper for each optimizer.

    Args:
        stages: sequence of `Stage`; those of one phase run in this order.
        step: `Step` of a rank, or `None` in one process.
        updates: list, to which each update of the step's own graph adds its optimizer and its variables; not one that
            a branch may leave out.
    """

    def __init__(
        self, stages: Sequence[Stage], step: Step | None = None, updates: list[OptimizerUpdate] | None = None
    ) -> None:
        self._step = step
        self._updates = [] if updates is None else updates
        self._graph: tf.Graph | None = None  # that of the step
        self.stages = sorted(stages, key=lambda stage: PHASES.index(stage.phase))
        self._is_running = False
        self._collected: list[tuple[keras.optimizers.Optimizer, list[tuple[Any, Any]]]] | None = None

    @contextlib.contextmanager
    def opened(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
        """Makes optimizers run the stages before each update while the context is open."""
        self._graph = tf.compat.v1.get_default_graph()
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                for stage in self.stages:
                    stack.enter_context(stage.opened(optimizer))
                for name, wrapper in self._wrappers(optimizer).items():
                    stack.enter_context(patched(optimizer, name, wrapper))
            yield

    def _wrappers(self, optimizer: keras.optimizers.Optimizer) -> dict[str, Callable[..., Any]]:
        apply, apply_gradients = optimizer.apply, optimizer.apply_gradients

        def run_and_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            variables = list(trainable_variables or trained_variables(innermost(optimizer)))
            if not variables:
                return apply(grads, trainable_variables)  # Keras says what is wrong
            if self._collected is not None:
                self._collected.append((optimizer, list(zip(grads, variables, strict=True))))
                return None
            return self._run(optimizer, list(grads), variables, apply)

        def run_and_apply_gradients(grads_and_vars: Any) -> Any:
            # Wrapped too, as a custom optimizer may clip here before it calls `apply`.
            pairs = list(grads_and_vars)
            if not pairs:
                return apply_gradients(pairs)
            if self._collected is not None:
                self._collected.append((optimizer, pairs))
                return None
            grads, variables = map(list, zip(*pairs, strict=True))
            return self._run(optimizer, grads, variables, lambda *each: apply_gradients(zip(*each, strict=True)))

        return {"apply": run_and_apply, "apply_gradients": run_and_apply_gradients}

    def _run(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        variables: list[Any],
        apply: Callable[[list[Any], Any], Any],
    ) -> Any:
        if self._is_running or not gradients:
            return apply(gradients, variables or None)  # called within another wrapper
        # A custom step that accumulates gradients may pass variables.
        tensors = [
            each if each is None or isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each)
            for each in gradients
        ]
        update = Update(optimizer, variables, tensors, self._step)
        if tf.compat.v1.get_default_graph() is self._graph:
            self._updates.append((optimizer, updated_variables(variables, tensors)))

        def proceed(place: int) -> Any:
            if place == len(self.stages):
                return apply(update.gradients, update.variables or None)
            return self.stages[place](update, lambda: proceed(place + 1))

        self._is_running = True
        try:
            return proceed(0)
        finally:
            self._is_running = False

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[tuple[keras.optimizers.Optimizer, list[tuple[Any, Any]]]]]:
        """Collects updates and runs no stages, for the part of the step that XLA compiles.

        Yields:
            A list of pairs of an optimizer and the `(gradient, variable)` pairs for its `apply_gradients`.
        """
        collected: list[Any] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None


def updated_variables(variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Returns the variables that Keras' optimizers update, and decay: not those without a gradient."""
    given = zip(variables, gradients, strict=True)
    return [v for v, gradient in given if gradient is not None and not getattr(v, "overwrite_with_gradient", False)]
