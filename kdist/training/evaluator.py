"""The evaluator of a cluster with parameter servers: it evaluates the chief's checkpoints beside the training."""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import logging
import os
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import ScopeError
from kdist.strategies.attendance import Line
from kdist.strategies.options import ParameterServer
from kdist.training import _keras_internals as internals
from kdist.training.arguments import like, named_arguments

logger = logging.getLogger("kdist")

_LOOK = 0.5  # seconds after which the evaluator looks for a new checkpoint


class Evaluator:
    """The evaluator's side of a cluster with parameter servers. One for all scopes of the process.

    Args:
        cluster: mapping of job name to addresses.
        index: int, this task's index among the evaluators.
        options: `ParameterServer`.

    Raises:
        ClusterError: if the chief does not appear.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]], index: int, options: ParameterServer) -> None:
        self._line = Line(cluster, "evaluator", index, options.timeout)

    @contextlib.contextmanager
    def scope(self, options: ParameterServer) -> Iterator[tf.distribute.Strategy]:
        """Makes `fit` of models that are made or used in it evaluate checkpoints; all else is Keras' own.

        Args:
            options: `ParameterServer`, which ask nothing of an evaluator.
        """
        del options
        with internals.watch_models(self._take, lambda model, verb: self._take(model)):
            yield tf.distribute.get_strategy()

    def _take(self, model: keras.Model) -> None:
        for name in internals.VERBS:
            original = getattr(type(model), name)
            wrapper: Callable[..., Any] = original.__get__(model)
            if name in ("fit", "train_on_batch"):
                wrapper = functools.partial(self._in_place_of, model, name)
            model.__dict__[name] = like(original, wrapper)

    def _in_place_of(self, model: keras.Model, verb: str, *args: Any, **kwargs: Any) -> None:
        """Evaluates instead of training, until the chief is done; the script then ends here."""
        bound = inspect.signature(getattr(type(model), verb)).bind(model, *args, **kwargs)
        arguments = named_arguments(bound)
        callbacks = _listed(arguments.get("callbacks"))
        pattern = checkpoint_pattern(callbacks)
        if verb != "fit" or pattern is None or arguments.get("validation_data") is None:
            raise ScopeError(
                f"An evaluator has nothing to evaluate. Received: {type(model).__name__}.{verb} with "
                f"{'' if arguments.get('validation_data') is None else 'validation_data and '}the callbacks "
                f"{[type(each).__name__ for each in callbacks]}. Expected `fit` with validation_data and a "
                "keras.callbacks.ModelCheckpoint or keras.callbacks.BackupAndRestore, whose files it reads. Fix: give "
                "it these, on all tasks; or start no evaluator."
            )
        if _is_deleted_at_the_end(callbacks):
            logger.warning(
                "the evaluator follows a BackupAndRestore, which deletes its file when training ends: the last epoch "
                "may go unseen. Fix: a keras.callbacks.ModelCheckpoint, or BackupAndRestore(delete_checkpoint=False)"
            )
        with _evaluation(model, arguments, callbacks, self._line) as evaluate:
            has_found = self._follow(pattern, evaluate)
        if not has_found:
            logger.warning(
                "the evaluator found no checkpoint at %s: it must see the disk of the chief, while the file is there",
                pattern,
            )
        raise SystemExit(0)

    def _follow(self, pattern: str, evaluate: Callable[[str], None]) -> bool:
        """Evaluates the newest checkpoint whenever there is a new one; returns whether there was any."""
        seen = None
        is_over = False
        while not is_over:
            is_over = self._line.wait(_LOOK)  # first: what was written until the end is looked at after it
            found = newest(pattern)
            if found is not None and found != seen:
                seen = found
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    evaluate(found[-1])
        return seen is not None


def checkpoint_pattern(callbacks: Sequence[keras.callbacks.Callback]) -> str | None:
    """Returns a pattern for `glob` of the files that the callbacks write for an evaluator.

    Args:
        callbacks: sequence of callbacks; a `ModelCheckpoint` comes before a `BackupAndRestore`.

    Returns:
        The pattern, with `*` for each field in a file's name, or `None` if no callback writes checkpoints.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            parts = string.Formatter().parse(callback.filepath)
            return "".join(glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in parts)
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            return glob.escape(callback._weights_path)
    return None


def _is_deleted_at_the_end(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    backups = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    is_followed = backups and not any(isinstance(each, keras.callbacks.ModelCheckpoint) for each in callbacks)
    return bool(is_followed) and backups[0].delete_checkpoint


def newest(pattern: str) -> tuple[int, int, str] | None:
    """Returns the newest file of a pattern: when it was written, its number on the disk, and its path.

    Args:
        pattern: str, for `glob`.
    """
    found = []
    for path in glob.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino, path))
    return max(found, default=None)


@contextlib.contextmanager
def _evaluation(
    model: keras.Model, arguments: Mapping[str, Any], callbacks: Sequence[keras.callbacks.Callback], line: Line
) -> Iterator[Callable[[str], None]]:
    """Gives what evaluates a checkpoint as `fit` would validate, given the arguments of `fit`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
    evaluate = functools.partial(
        model.evaluate,
        x,
        y,
        sample_weight=sample_weight,
        batch_size=arguments.get("validation_batch_size") or arguments.get("batch_size"),
        verbose=0,
        return_dict=True,
    )
    # Others of the user's may expect a training: epochs, and logs of these.
    boards = [each for each in callbacks if isinstance(each, keras.callbacks.TensorBoard)]
    listening = keras.callbacks.LambdaCallback(on_test_batch_begin=lambda batch, logs: line.wait(0.0))
    calls = keras.callbacks.CallbackList([*boards, listening], model=model)

    def run(path: str) -> None:
        if not model.built:
            evaluate(steps=1)  # builds it
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)  # its count is that of TensorBoard's axis
        model.load_weights(path)
        logs = evaluate(steps=arguments.get("validation_steps"), callbacks=calls)
        logger.info("evaluated %s: %s", path, ", ".join(f"{name} {value:.6g}" for name, value in logs.items()))

    calls.on_train_begin()
    yield run
    calls.on_train_end()


def _listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [] if callbacks is None else keras.tree.flatten(callbacks)
