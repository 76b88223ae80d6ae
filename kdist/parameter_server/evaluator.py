"""The evaluator of a cluster with parameter servers: it evaluates the chief's checkpoints while the chief trains."""

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
from kdist.keras_hooks.fit.callbacks import given_callbacks, weights_path
from kdist.keras_hooks.patching import METHODS, original
from kdist.keras_hooks.signatures import named_arguments
from kdist.keras_hooks.trainer import patch_methods, watch_models
from kdist.parameter_server.connection import ChiefConnection, Cluster
from kdist.strategies.options import ParameterServer

logger = logging.getLogger("kdist")

_POLL_INTERVAL = 0.5  # seconds after which the evaluator looks for a new checkpoint


class Evaluator:
    """The evaluator's side of a cluster with parameter servers. One for all scopes of the process.

    Args:
        cluster: mapping of job name to addresses.
        index: int, this task's index among the evaluators.
        options: `ParameterServer`.

    Raises:
        ClusterError: if the chief cannot be reached.
    """

    def __init__(self, cluster: Cluster, index: int, options: ParameterServer) -> None:
        self._chief = ChiefConnection(cluster, "evaluator", index, options.timeout)

    @contextlib.contextmanager
    def scope(self, options: ParameterServer) -> Iterator[tf.distribute.Strategy]:
        """Makes `fit` of models that are made or used in it evaluate checkpoints; all else is Keras' own.

        Args:
            options: `ParameterServer`, unused: they concern training.
        """
        del options
        with watch_models(self._patch, lambda model, method: self._patch(model)):
            yield tf.distribute.get_strategy()

    def _patch(self, model: keras.Model) -> None:
        wrappers = {name: original(model, name) for name in METHODS}
        for name in ("fit", "train_on_batch"):
            wrappers[name] = functools.partial(self._evaluate_checkpoints, model, name)
        patch_methods(model, wrappers)

    def _evaluate_checkpoints(self, model: keras.Model, method: str, *args: Any, **kwargs: Any) -> None:
        """Evaluates instead of training, until the chief has finished; the script then ends here."""
        bound = inspect.signature(getattr(type(model), method)).bind(model, *args, **kwargs)
        arguments = named_arguments(bound)
        callbacks = given_callbacks(arguments)
        pattern = checkpoint_pattern(callbacks)
        if method != "fit" or pattern is None or arguments.get("validation_data") is None:
            raise ScopeError(
                f"The evaluator finds no checkpoints or no data here. Received: {type(model).__name__}.{method} with "
                f"{'' if arguments.get('validation_data') is None else 'validation_data and '}the callbacks "
                f"{[type(each).__name__ for each in callbacks]}. Expected `fit` with validation_data and a "
                "keras.callbacks.ModelCheckpoint or keras.callbacks.BackupAndRestore, whose files it reads. Fix: give "
                "these to fit, on all tasks; or start no evaluator."
            )
        if getattr(_writer(callbacks), "delete_checkpoint", False):
            logger.warning(
                "the evaluator follows a BackupAndRestore, which deletes its file when training ends: the last epoch "
                "may not be evaluated. Fix: a ModelCheckpoint, or BackupAndRestore(delete_checkpoint=False)"
            )
        with _evaluation(model, arguments, callbacks, self._chief) as evaluate:
            has_found = self._follow(pattern, evaluate)
        if not has_found:
            logger.warning(
                "the evaluator found no checkpoint at %s. Fix: a directory that the chief and the evaluator share",
                pattern,
            )
        raise SystemExit(0)

    def _follow(self, pattern: str, evaluate: Callable[[str], None]) -> bool:
        """Evaluates the newest checkpoint whenever there is a new one; returns whether there was any."""
        seen = None
        is_over = False
        while not is_over:
            is_over = self._chief.wait(_POLL_INTERVAL)  # before the search, which so finds the last checkpoint
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
    writer = _writer(callbacks)
    if isinstance(writer, keras.callbacks.ModelCheckpoint):
        parts = string.Formatter().parse(writer.filepath)
        return "".join(glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in parts)
    return None if writer is None else glob.escape(weights_path(writer))


def _writer(callbacks: Sequence[keras.callbacks.Callback]) -> Any:
    """Returns the callback whose files the evaluator reads."""
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return next((each for kind in kinds for each in callbacks if isinstance(each, kind)), None)


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
    model: keras.Model,
    arguments: Mapping[str, Any],
    callbacks: Sequence[keras.callbacks.Callback],
    chief: ChiefConnection,
) -> Iterator[Callable[[str], None]]:
    """Yields a function that evaluates a checkpoint as `fit` validates, given the arguments of `fit`."""
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
    # Other callbacks of the user's may expect training: epochs, and their logs.
    boards = [each for each in callbacks if isinstance(each, keras.callbacks.TensorBoard)]
    heartbeat = keras.callbacks.LambdaCallback(on_test_batch_begin=lambda batch, logs: chief.wait(0.0))
    calls = keras.callbacks.CallbackList([*boards, heartbeat], model=model)

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
