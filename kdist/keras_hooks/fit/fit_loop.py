"""The epoch iterator and the callback list that Keras' `fit`, `evaluate` and `predict` make."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers import data_adapters
from keras.src.trainers.epoch_iterator import EpochIterator

from kdist.keras_hooks.fit.data_adapters import DataAdapter
from kdist.keras_hooks.patching import patched


@contextlib.contextmanager
def epoch_iterators(
    make: Callable[..., Any], strategy: tf.distribute.Strategy, *, is_chief: bool = True
) -> Iterator[None]:
    """Makes `fit`, `evaluate` and `predict` of models of one strategy use iterators from `make`.

    Args:
        make: callable that takes Keras' data adapter, and by name `steps_per_epoch`, `steps_per_execution`, and
            `is_for_training`, whether `fit` trains on the data; it returns an iterator in place of Keras'
            `TFEpochIterator`.
        strategy: the strategy; models of other strategies use Keras' iterator.
        is_chief: bool, whether this process shows the warnings of Keras' adapters.
    """
    outer = trainer_module.TFEpochIterator

    def dispatch(
        *args: Any,
        distribute_strategy: Any = None,
        steps_per_epoch: int | None = None,
        steps_per_execution: int = 1,
        **kwargs: Any,
    ) -> Any:
        if distribute_strategy is strategy:
            # Not on the chief: the context resets which warnings have been shown.
            with contextlib.nullcontext() if is_chief else warnings.catch_warnings():
                if not is_chief:
                    warnings.simplefilter("ignore")
                adapter = data_adapters.get_data_adapter(*args, steps_per_epoch=steps_per_epoch, **kwargs)
            return make(
                adapter,
                steps_per_epoch=steps_per_epoch,
                steps_per_execution=steps_per_execution,
                is_for_training="class_weight" in kwargs,  # given by `fit`, and not for its validation data
            )
        return outer(
            *args,
            distribute_strategy=distribute_strategy,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
            **kwargs,
        )

    with patched(trainer_module, "TFEpochIterator", dispatch):
        yield


@contextlib.contextmanager
def callback_lists(make: Callable[..., Any], strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes `fit`, `evaluate` and `predict` of models of one strategy use a `CallbackList` from `make`.

    Args:
        make: callable with the arguments of `keras.callbacks.CallbackList`, whose first may be such a list; it returns
            a list, which the call and the calls within it use.
        strategy: the strategy; models of other strategies use Keras' list.
    """
    plain = keras.callbacks.CallbackList
    made: list[keras.callbacks.CallbackList] = []

    class ListType(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return any(instance is each for each in made)

        def __call__(cls, callbacks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if getattr(kwargs.get("model"), "distribute_strategy", None) is strategy:
                made.append(make(callbacks, *args, **kwargs))
                return made[-1]
            return callbacks if isinstance(callbacks, plain) else plain(callbacks, *args, **kwargs)

    module = types.SimpleNamespace(CallbackList=ListType("CallbackList", (), {}))
    with patched(trainer_module, "callbacks_module", module):
        yield


class PassIterator(TFEpochIterator):
    """Iterates over the dataset of a data adapter. Subclasses override `make_iterator`, `steps` and `warn_of_the_end`.

    Args:
        adapter: Keras' `DataAdapter`.
        strategy: the strategy of the model, or `None`.
        steps_per_epoch: int or `None`, as given by the user.
        steps_per_execution: int, the steps in one call of the model's function during a pass.
        begin_pass: callable, called before the first step of a pass.
        end_pass: callable, called after the last step of a pass.

    Attributes:
        dataset: `tf.data.Dataset`, the adapter's.
    """

    def __init__(
        self,
        adapter: DataAdapter,
        *,
        strategy: tf.distribute.Strategy | None = None,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        begin_pass: Callable[[], None],
        end_pass: Callable[[], None],
    ) -> None:
        EpochIterator.__init__(self, adapter, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution)
        self._distribute_strategy = strategy
        self.dataset = adapter.get_tf_dataset()  # once, as TensorFlow registers its functions each time
        self._begin_pass = begin_pass
        self._end_pass = end_pass

    @property
    def steps_of_pass(self) -> int | None:
        """The steps of a whole pass; `None` in the first pass over data of unknown length."""
        return self._num_batches

    @steps_of_pass.setter
    def steps_of_pass(self, steps: int | None) -> None:
        """Sets the steps of a whole pass."""
        self._num_batches = steps

    @property
    def steps_seen(self) -> int:
        """The steps of the pass so far, with those of the running execution."""
        return self._steps_seen

    @property
    def iterator(self) -> Any:
        """The iterator of the pass; `None` before the first."""
        return self._current_iterator

    @iterator.setter
    def iterator(self, iterator: Any) -> None:
        """Sets the iterator of the pass."""
        self._current_iterator: Any = iterator

    def begin_at(self, steps_seen: int) -> None:
        """Begins a pass after some of its steps."""
        self.iterator = iter(self.make_iterator())
        self._steps_seen = steps_seen

    # What subclasses override.

    def make_iterator(self) -> Any:
        """Returns an iterator over the next pass."""
        return self.dataset

    def steps(self) -> Iterator[Any]:
        """Yields the executions of an epoch: their first step, their last step, and the iterator."""
        return super()._enumerate_iterator()

    def warn_of_the_end(self) -> None:
        """Warns that the data has fewer than `steps_per_epoch` batches."""
        super()._interrupted_warning()

    # What Keras calls.

    def _get_iterator(self) -> Any:
        return self.make_iterator()

    def _enumerate_iterator(self) -> Iterator[Any]:
        return self.steps()

    def _interrupted_warning(self) -> None:
        self.warn_of_the_end()

    def __iter__(self) -> Any:
        """Begins a pass."""
        self._begin_pass()
        return super().__iter__()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the pass at the end of the loop or of the data, not if the loop raises."""
        with super().catch_stop_iteration():
            yield
        self._end_pass()
