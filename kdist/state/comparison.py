"""Comparisons over the ranks: settings and models before the first step, the bytes of variables after it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdist._user_code import user_line
from kdist.engines.engine import Engine
from kdist.errors import MismatchError, NotSynchronizedError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import innermost, stored_learning_rate
from kdist.keras_hooks.trainer import compile_arguments
from kdist.keras_hooks.variables import number_of
from kdist.state.broadcast import gathered_checksums

logger = logging.getLogger("kdist")


def check_agreement(engine: Engine, what: str, local: Mapping[str, Any]) -> None:
    """Raises on all ranks unless values are equal on all of them.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        what: str, what is compared, for the message.
        local: mapping of names to anything that JSON can write.

    Raises:
        MismatchError: naming the rank and the first name whose values differ.
    """
    refuse_differences(what, gather_values(engine, what, dict(local)))


def refuse_differences(
    what: str, by_rank: Sequence[Mapping[str, Any]], refuse_otherwise: Callable[[str, int], None] | None = None
) -> None:
    """Raises unless values are equal on all ranks.

    Args:
        what: str, what is compared, for the message.
        by_rank: sequence of mappings of names to values, by rank, gathered by all of them.
        refuse_otherwise: function of such a name and the rank that differs, which raises where another error is
            clearer, or `None`.

    Raises:
        MismatchError: naming the rank and the first name whose values differ.
    """
    root, *others = by_rank
    for rank, other in enumerate(others, 1):
        for name in [*root, *other]:
            mine, theirs = root.get(name, "nothing"), other.get(name, "nothing")
            if mine != theirs:
                mine, theirs = _excerpts(mine, theirs)
                if refuse_otherwise is not None:
                    logger.debug("%s, %s: %s on rank 0, %s on rank %d", what, name, mine, theirs, rank)
                    refuse_otherwise(name, rank)
                raise MismatchError(
                    f"Ranks differ in {what}: {name}. Received: {mine} on rank 0 and {theirs} on rank {rank}. "
                    f"Expected the same on all {len(by_rank)} ranks. Fix: look for what depends on the rank, the host "
                    "or an unseeded random number."
                )


def gather_values(engine: Engine, what: str, value: Any) -> list[Any]:
    """Returns the values of all ranks, by rank.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        what: str, what the value is of, for the message.
        value: anything that JSON can write.

    Raises:
        MismatchError: if another rank sends the value of something else.
    """
    gathered = engine.gather_objects([what, value])
    for rank, (other, _) in enumerate(gathered):
        if other != gathered[0][0]:
            lines = engine.gather_objects(user_line())  # all ranks have found it
            raise MismatchError(
                f"Ranks make different calls. Received: {gathered[0][0]} on rank 0, {lines[0]}, and {other} on rank "
                f"{rank}, {lines[rank]}. Expected every rank to make the same calls in the same order. Fix: look for a "
                "branch on the rank around the call."
            )
    return [each for _, each in gathered]


def _excerpts(one: Any, other: Any, width: int = 300) -> tuple[str, str]:
    """Returns two values as text; long ones are cut to the part that differs."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (one, other)]
    start = max(0, len(os.path.commonprefix(texts)) - width // 3) if max(map(len, texts)) > width else 0

    def cut(text: str) -> str:
        return ("..." if start else "") + text[start : start + width] + ("..." if len(text) > start + width else "")

    return cut(texts[0]), cut(texts[1])


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns what must be equal on all ranks in a model, as JSON values by name."""
    described: dict[str, Any] = {"class of the model": type(model).__name__}
    for number, variable in enumerate(model.variables):
        described[f"variable {number}"] = [variable.name, list(variable.shape), str(variable.dtype), variable.trainable]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        described["class of the optimizer"] = type(optimizer).__name__
        described["optimizer"] = _settings(optimizer, without=("learning_rate",) if _has_rate(optimizer) else ())
    for name, value in compile_arguments(model).items():
        if name != "optimizer":
            described[f"compile's {name}"] = _settings(value)
    described["metrics"] = [metric.name for metric in model.metrics]
    return described


def whole_weights(model: keras.Model) -> dict[str, Any]:
    """Returns the trained variables that are whole on every rank, by path."""
    return {each.path: each for each in model.trainable_variables if table_of(each) is None}


def learning_rates(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[str, float]:
    """Returns the users' learning rates by name, of optimizers that hold a number and no schedule."""
    return {
        f"learning_rate of {type(optimizer).__name__} ({number})": number_of(optimizer.learning_rate)
        for number, optimizer in enumerate(optimizers)
        if _has_rate(optimizer)
    }


def _has_rate(optimizer: keras.optimizers.Optimizer) -> bool:
    # A number is state: a callback may have restored it on the chief only. A schedule is a setting.
    optimizer = innermost(optimizer)
    has_one_rate = not hasattr(optimizer, "optimizers")  # a `MultiOptimizer` has one for each part
    return has_one_rate and isinstance(stored_learning_rate(optimizer), keras.Variable)


def _settings(thing: Any, without: tuple[str, ...] = ()) -> str:
    """Returns an object's settings as text; its class where it has no settings that can be written."""

    def described(part: Any) -> Any:
        if callable(part) and not hasattr(part, "get_config"):
            return getattr(part, "__name__", type(part).__name__)  # the code of equal functions may differ
        try:
            return keras.saving.serialize_keras_object(part)
        except Exception:  # a user's own class may do anything in get_config
            return type(part).__name__

    # Without names: Keras numbers automatic ones, and a rank may have made more objects than another.
    settings = _without(("name", *without), keras.tree.map_structure(described, thing))
    return json.dumps(settings, sort_keys=True, default=str)


def _without(keys: tuple[str, ...], settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _without(keys, value) for key, value in settings.items() if key not in keys}
    return [_without(keys, item) for item in settings] if isinstance(settings, (list, tuple)) else settings


class Difference(NamedTuple):
    """Where ranks differ.

    Attributes:
        place: int, the index of the first variable that differs.
        ranks: list of int, the ranks whose value is not the most frequent one.
        root: int, the lowest rank that has the most frequent value.
    """

    place: int
    ranks: list[int]
    root: int


def first_difference(engine: Engine, variables: Sequence[Any]) -> Difference | None:
    """Compares a checksum of each variable's bytes over the ranks.

    Collective: every rank must call this, in the same order.

    Returns:
        The first difference, or `None`; the same on all ranks.
    """
    variables = [variable for variable in variables if variable.dtype != "string"]
    return _difference(gathered_checksums(engine, variables))


def _difference(gathered: np.ndarray) -> Difference | None:
    places = np.flatnonzero((gathered != gathered[0]).any(axis=0))
    if not places.size:
        return None
    place = int(places[0])
    column = gathered[:, place].tolist()
    usual = max(column, key=column.count)  # in a tie, that of the lowest rank
    return Difference(place, [rank for rank, value in enumerate(column) if value != usual], column.index(usual))


def check_equal(engine: Engine, named: Mapping[str, Any], others: Sequence[Any] = ()) -> np.ndarray:
    """Raises on all ranks if variables differ after the first step: an update was not synchronised.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        named: mapping of names to variables of numbers.
        others: sequence of variables, which may differ.

    Returns:
        The checksums of the others on all ranks, of shape `(size, number of others)`.

    Raises:
        NotSynchronizedError: naming the first variable that differs and the ranks.
    """
    checksums = gathered_checksums(engine, [*named.values(), *others])
    found = _difference(checksums[:, : len(named)])
    if found is not None:
        on_gpus = (
            " Code of your own that adds up rows of a sparse gradient on a GPU does so in no fixed order: "
            "kdist.scope(kdist.AllReduce(sparse_as_dense=True)), or TF_DETERMINISTIC_OPS=1."
        )
        on_gpus = on_gpus if tf.config.get_visible_devices("GPU") else ""
        raise NotSynchronizedError(
            f"After the first training step {list(named)[found.place]!r} differs between the ranks. Received: other "
            f"values on rank(s) {found.ranks} than on rank {found.root}. Expected reduced gradients in every "
            "update. Fix: update weights through an optimizer that is an attribute of the model "
            f"(`self.optimizer.apply(...)`), not by `assign`.{on_gpus} Versions: Keras {keras.__version__}, "
            f"TensorFlow {tf.__version__}; if the training step is Keras' own, kdist does not support this version of "
            "Keras."
        )
    return checksums[:, len(named) :]
