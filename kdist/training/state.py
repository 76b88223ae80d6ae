"""One state on all ranks: what is compared and what is broadcast when training, evaluation or prediction begins."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdist.engines import flat
from kdist.engines.engine import Engine
from kdist.errors import MismatchError, NotSynchronizedError
from kdist.gradients.wire import buckets
from kdist.training import _keras_internals as internals
from kdist.training.optimizers import innermost, optimizers_of

_BROADCAST_MB = 16.0  # of weights in a message, from which on it is sent


def check_agreement(engine: Engine, what: str, mine: Mapping[str, Any]) -> None:
    """Raises on all ranks unless every rank has said the same.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        what: str, what is compared, for the message.
        mine: mapping of names to anything that JSON can write.

    Raises:
        MismatchError: naming the rank and the first name whose values differ.
    """
    everyone = engine.gather_objects({"what": what, "values": dict(mine)})
    root = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs["what"] != root["what"]:
            raise MismatchError(
                f"Ranks do different things. Received: {root['what']} on rank 0 and {theirs['what']} on rank {rank}. "
                "Expected every rank to make the same calls in the same order. Fix: look for a branch on the rank "
                "around it."
            )
        for name in [*root["values"], *theirs["values"]]:
            one, other = root["values"].get(name, "nothing"), theirs["values"].get(name, "nothing")
            if one != other:
                one, other = _around_the_difference(one, other)
                raise MismatchError(
                    f"Ranks differ in {what}: {name}. Received: {one} on rank 0 and {other} on rank {rank}. "
                    f"Expected the same on all {engine.size} ranks. Fix: look for a branch on the rank, on the host's "
                    "name or on an unseeded random number where it is made."
                )


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns what must be equal of a model on all ranks, as JSON values by name."""
    described: dict[str, Any] = {"class of the model": type(model).__name__}
    for number, variable in enumerate(model.variables):
        described[f"variable {number}"] = [variable.name, list(variable.shape), str(variable.dtype), variable.trainable]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        described["class of the optimizer"] = type(optimizer).__name__
        described["optimizer"] = _settings(optimizer, without=("learning_rate",) if _has_rate(optimizer) else ())
    for name, value in internals.compile_arguments(model).items():
        if name != "optimizer":
            described[f"compile's {name}"] = _settings(value)
    described["metrics"] = [metric.name for metric in model.metrics]
    return described


def learning_rates(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[str, float]:
    """Returns the users' own rates by name, of those optimizers that hold a number and no schedule."""
    return {
        f"learning_rate of {type(optimizer).__name__} ({number})": float(optimizer.learning_rate)
        for number, optimizer in enumerate(optimizers)
        if _has_rate(optimizer)
    }


def _has_rate(optimizer: keras.optimizers.Optimizer) -> bool:
    # A number is state, which a callback may have restored on the chief alone. A schedule is a setting.
    optimizer = innermost(optimizer)
    is_one = not hasattr(optimizer, "optimizers")  # a `MultiOptimizer` has as many rates as parts
    return is_one and isinstance(optimizer._learning_rate, keras.Variable)


def _settings(thing: Any, without: tuple[str, ...] = ()) -> str:
    """Returns an object's settings as text; what has no settings that can be written is its class."""

    def described(part: Any) -> Any:
        if callable(part) and not hasattr(part, "get_config"):
            return getattr(part, "__name__", type(part).__name__)  # written as code, equal functions may differ
        try:
            return keras.saving.serialize_keras_object(part)
        except Exception:  # a user's own class may do anything in get_config
            return type(part).__name__

    # Names are left out: Keras numbers those that nobody gave, and a rank may have made more objects than another.
    settings = _without(("name", *without), keras.tree.map_structure(described, thing))
    return json.dumps(settings, sort_keys=True, default=str)


def _without(keys: tuple[str, ...], settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _without(keys, value) for key, value in settings.items() if key not in keys}
    return [_without(keys, item) for item in settings] if isinstance(settings, (list, tuple)) else settings


def _around_the_difference(one: Any, other: Any, width: int = 300) -> tuple[str, str]:
    """Returns two values as text, long ones cut so that what differs is seen."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (one, other)]
    start = max(0, len(os.path.commonprefix(texts)) - width // 3) if max(map(len, texts)) > width else 0

    def cut(text: str) -> str:
        return ("..." if start else "") + text[start : start + width] + ("..." if len(text) > start + width else "")

    return cut(texts[0]), cut(texts[1])


def broadcast_state(engine: Engine, variables: Sequence[Any], root: int = 0) -> None:
    """Gives every rank the root's values of variables.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        variables: sequence of `keras.Variable` or `tf.Variable`, the same on all ranks.
        root: int, the rank whose values are taken.
    """
    raw = [_raw(variable) for variable in variables if variable.dtype != "string"]
    for index, value in broadcast_by_groups(engine, raw, root):
        raw[index].assign(value)


def broadcast_by_groups(engine: Engine, values: Sequence[Any], root: int = 0) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the root's values and their places, in any order, while the next ones are sent.

    A few at a time: a message of all weights and slots at once would be the most memory that a training takes.

    Collective: every rank must call this, in the same order, and take all.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        values: sequence of arrays or variables, of the same shapes and dtypes on all ranks.
        root: int, the rank whose values are taken.
    """
    sizes = [math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in values]
    for group in buckets(sizes, _BROADCAST_MB):
        sent = engine.broadcast([tf.convert_to_tensor(values[index]) for index in group], root=root)
        yield from zip(group, sent, strict=True)


def _raw(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def random_state() -> dict[str, Any]:
    """Returns Python's and NumPy's random states (and PyTorch's, if it is loaded), as JSON can write them."""
    torch = sys.modules.get("torch")
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": None if torch is None else torch.get_rng_state().tolist(),
    }


def set_random_state(states: Mapping[str, Any]) -> None:
    """Sets what `random_state` has returned, here or elsewhere."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch = sys.modules.get("torch")
    if torch is not None and states["torch"] is not None:
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))


def agree_random_state(engine: Engine) -> None:
    """Gives every rank the root's Python and NumPy random states (and PyTorch's, if it is loaded).

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
    """
    root = engine.broadcast_object(random_state() if engine.rank == 0 else None)
    if engine.rank != 0:
        set_random_state(root)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns what all ranks hold alike: weights, statistics, random states and what the optimizers keep.

    Metrics are not among it: each rank counts its own rows.

    Args:
        model: `keras.Model`.

    Returns:
        A list of `keras.Variable` and `tf.Variable`, each once, in an order that is the same on all ranks.
    """
    found = {id(variable): variable for variable in model.variables}
    for optimizer in optimizers_of(model):
        found.update({id(variable): variable for variable in optimizer.variables})
    for generator in internals.seed_generators(model):
        found.setdefault(id(generator.state), generator.state)
    return list(found.values())


class Difference(NamedTuple):
    """Where ranks differ.

    Attributes:
        place: int, the number of the first variable that differs.
        ranks: list of int, the ranks whose value is not that of most.
        root: int, the lowest of the ranks that have what most have.
    """

    place: int
    ranks: list[int]
    root: int


def first_difference(engine: Engine, variables: Sequence[Any]) -> Difference | None:
    """Compares the bytes of variables over the ranks by a checksum of each; returns the same on all ranks.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        variables: sequence of `keras.Variable` or `tf.Variable`, the same on all ranks.

    Returns:
        The first difference, or `None`.
    """
    variables = [variable for variable in variables if variable.dtype != "string"]
    arrays = [np.ascontiguousarray(flat.to_array(tf.convert_to_tensor(_raw(variable)))) for variable in variables]
    mine = np.array([[zlib.crc32(array.reshape(-1).view(np.uint8).data) for array in arrays]], np.int64)
    everyone = np.asarray(engine.allgather([tf.constant(mine)])[0])
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=0))
    if not differing.size:
        return None
    place = int(differing[0])
    column = everyone[:, place].tolist()
    usual = max(column, key=column.count)  # of several, what the lowest rank has
    return Difference(place, [rank for rank, value in enumerate(column) if value != usual], column.index(usual))


def check_equal(engine: Engine, named: Mapping[str, Any]) -> None:
    """Raises on all ranks if the weights differ after the first step: an update was not synchronised.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        named: mapping of names to variables.

    Raises:
        NotSynchronizedError: naming the first variable that differs, and the ranks.
    """
    found = first_difference(engine, list(named.values()))
    if found is not None:
        raise NotSynchronizedError(
            f"After the first training step {list(named)[found.place]!r} differs between the ranks. Received: other "
            f"values on rank(s) {found.ranks} than on rank {found.root}. Expected every update to follow a reduction "
            "over the ranks. Fix: update weights through an optimizer that is an attribute of the model "
            f"(`self.optimizer.apply(...)`), not by `assign`. Versions: Keras {keras.__version__}, TensorFlow "
            f"{tf.__version__}; if the training step is Keras' own, this Keras does something that kdist does not know."
        )
