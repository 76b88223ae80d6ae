"""Private attributes of `tf.data.Dataset` objects: the one file that reads TensorFlow's, and that sets kdist's own.

TensorFlow has no public way to see of which operations a dataset was made. `missing_names` checks the table below
against the installed TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import tensorflow as tf

_Dataset = tf.data.Dataset


class _Op(NamedTuple):
    """One class of datasets: how one is made of another dataset, and the attributes read, without their underscore."""

    make: Callable[[Any], Any]
    attributes: tuple[str, ...] = ()


# All of them keep the order of their inputs if their functions are deterministic, but for Random and Shuffle.
_OPS = {
    "Batch": _Op(lambda dataset: dataset.batch(1), ("batch_size", "drop_remainder")),
    "Cache": _Op(lambda dataset: dataset.cache(), ("filename",)),
    "Concatenate": _Op(lambda dataset: dataset.concatenate(dataset)),
    "Filter": _Op(lambda dataset: dataset.filter(lambda _: True)),
    "FlatMap": _Op(lambda dataset: dataset.flat_map(_Dataset.from_tensors)),
    "Map": _Op(lambda dataset: dataset.map(lambda x: x)),
    "Options": _Op(lambda dataset: dataset.with_options(tf.data.Options())),
    "PaddedBatch": _Op(
        lambda dataset: dataset.padded_batch(1), ("batch_size", "drop_remainder", "padded_shapes", "padding_values")
    ),
    "ParallelBatch": _Op(
        lambda dataset: dataset.batch(1, num_parallel_calls=1),
        ("batch_size", "drop_remainder", "num_parallel_calls", "deterministic"),
    ),
    "ParallelMap": _Op(
        lambda dataset: dataset.map(lambda x: x, num_parallel_calls=1), ("num_parallel_calls", "deterministic")
    ),
    "Prefetch": _Op(lambda dataset: dataset.prefetch(1), ("buffer_size",)),
    "Random": _Op(lambda _: _Dataset.random(), ("seed", "seed2")),
    "Range": _Op(lambda _: _Dataset.range(1), ("start", "stop", "step")),
    "Repeat": _Op(lambda dataset: dataset.repeat(), ("count",)),
    "Restructured": _Op(lambda dataset: dataset.batch(1).unbatch()._inputs()[0]),
    "Shard": _Op(lambda dataset: dataset.shard(1, 0), ("num_shards", "index")),
    "Shuffle": _Op(lambda dataset: dataset.shuffle(1), ("buffer_size", "seed", "seed2", "reshuffle_each_iteration")),
    "Skip": _Op(lambda dataset: dataset.skip(1), ("count",)),
    "Take": _Op(lambda dataset: dataset.take(1), ("count",)),
    "Tensor": _Op(lambda _: _Dataset.from_tensors(0), ("tensors",)),
    "TensorSlice": _Op(lambda _: _Dataset.from_tensor_slices([0]), ("tensors",)),
    "TextLine": _Op(lambda _: tf.data.TextLineDataset([]), ("impl",)),
    "Unbatch": _Op(lambda dataset: dataset.batch(1).unbatch()),
    "Window": _Op(lambda dataset: dataset.window(1)),
    "Zip": _Op(lambda dataset: _Dataset.zip(dataset, dataset)),
}
_NAMES = ("_flat_structure", "_functions", "_inputs")  # of every dataset
ON_ONE_DEVICE = {"experimental_ints_on_device": True}
"""Attributes of a `tf.function` that `tf.data` does not prepare for several devices."""


def missing_names() -> list[str]:
    """Returns the private names in use that the installed TensorFlow lacks: classes of datasets, and attributes."""
    dataset = _Dataset.range(1)
    missing = [f"Dataset.{name}" for name in _NAMES if not hasattr(dataset, name)]
    for name, op in _OPS.items():
        made = op.make(dataset)
        if kind(made) != name:
            missing.append(f"_{name}Dataset")
        missing += [f"_{name}Dataset._{each}" for each in op.attributes if not hasattr(made, f"_{each}")]
    if not all(hasattr(function, "function") for function in dataset.map(lambda x: x)._functions()):
        missing.append("Dataset._functions()[0].function")
    try:
        tf.function(lambda: 0, experimental_attributes=ON_ONE_DEVICE)
    except ValueError:
        missing += [f"tf.function(experimental_attributes): {name}" for name in ON_ONE_DEVICE]
    return missing


def kind(dataset: Any) -> str:
    """Returns the last operation of a dataset, as `"ParallelMap"`."""
    name = type(dataset).__name__
    found = re.fullmatch(r"_?(\w+?)Dataset(V\d+)?", name)
    return found.group(1) if found else name


def is_known(dataset: Any) -> bool:
    """Returns whether the table has the last operation of a dataset, and this TensorFlow all its attributes."""
    op = _OPS.get(kind(dataset))
    return op is not None and all(hasattr(dataset, f"_{name}") for name in op.attributes)


def attributes(dataset: Any) -> SimpleNamespace:
    """Returns the attributes of the last operation of a dataset that the table names, as far as there are any."""
    op = _OPS.get(kind(dataset))
    names = op.attributes if op else ()
    return SimpleNamespace(**{name: getattr(dataset, f"_{name}") for name in names if hasattr(dataset, f"_{name}")})


def asked_parallelism(dataset: Any) -> int | None:
    """Returns the parallel calls or reads that the last operation of a dataset was given; `None` if it takes none."""
    found = [getattr(dataset, name, None) for name in ("_num_parallel_calls", "_num_parallel_reads")]
    return next((int(value) for value in found if value is not None), None)


def inputs(dataset: Any) -> list[Any]:
    """Returns the datasets that the last operation of a dataset takes; of a reader of files, what reads their names."""
    reader = getattr(dataset, "_impl", None)
    return [reader] if reader is not None else list(resources_of(dataset).get(INPUTS) or dataset._inputs())


def with_inputs(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it is made of, from the end to the beginning."""
    yield dataset
    for each in inputs(dataset):
        yield from with_inputs(each)


def is_nondeterministic_op(dataset: Any) -> bool:
    """Returns whether the last operation of a dataset may order elements differently on each rank."""
    op = attributes(dataset)
    if kind(dataset) in ("Random", "Shuffle"):
        return int(getattr(op, "seed", 0)) == int(getattr(op, "seed2", 0)) == 0
    return getattr(op, "deterministic", "default") == "false"


def reshuffles(dataset: Any) -> bool:
    """Returns whether the last operation of a dataset is a shuffle with another order in each iteration."""
    return kind(dataset) == "Shuffle" and getattr(attributes(dataset), "reshuffle_each_iteration", None) is not False


def seeded_shuffles(dataset: Any) -> list[Any]:
    """Returns each shuffle of a dataset that has a seed, and another order in each iteration; inputs first."""
    return list({id(each): each for each in inputs_first(dataset) if is_seeded_shuffle(each)}.values())


def is_seeded_shuffle(dataset: Any) -> bool:
    """Returns whether the last operation of a dataset is such a shuffle."""
    return reshuffles(dataset) and not is_nondeterministic_op(dataset)


def inputs_first(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it is made of, from the beginning to the end."""
    for each in inputs(dataset):
        yield from inputs_first(each)
    yield dataset


def functions(dataset: Any) -> list[Any]:
    """Returns the traced functions of the last operation of a dataset, as concrete functions."""
    return [function.function for function in dataset._functions()]


def holds_datasets(dataset: Any) -> bool:
    """Returns whether the last operation of a dataset holds others, as elements, or captured by its functions.

    They are none of its `inputs`: only its graph shows whether they are shuffled.
    """
    captured = [tensor.dtype for function in functions(dataset) for tensor in function.captured_inputs]
    is_source = kind(dataset) in ("Tensor", "TensorSlice")
    specs = tf.nest.flatten(dataset.element_spec) if is_source else []
    return tf.variant in captured or any(isinstance(spec, tf.data.DatasetSpec) for spec in specs)


def flat_structure(dataset: Any) -> dict[str, Any]:
    """Returns the arguments `output_types` and `output_shapes` of an op that yields the same elements."""
    return dict(dataset._flat_structure)


def from_variant(variant: Any, user_dataset: tf.data.Dataset, *resources: Any) -> tf.data.Dataset:
    """Returns a dataset made of a variant tensor.

    Args:
        variant: scalar variant tensor that holds a dataset.
        user_dataset: the user's dataset with the same elements, kept alive: its Python functions may be called.
        *resources: anything else to keep alive.
    """
    dataset = tf.data.experimental.from_variant(variant, user_dataset.element_spec)
    return keep_alive(dataset, user_dataset, *resources)


def keep_alive(dataset: tf.data.Dataset, *resources: Any) -> tf.data.Dataset:
    """Returns a dataset that was made of a variant tensor, and keeps what it was made of as long as it lives."""
    resources_of(dataset)[_MADE_OF] = resources
    return dataset


def is_of_kdist(dataset: Any) -> bool:
    """Returns whether kdist has made a dataset of a variant tensor."""
    return _MADE_OF in resources_of(dataset)


_MADE_OF = "made of"
INPUTS = "inputs"
"""The key in `resources_of` of the datasets that an operation of kdist's own takes."""

GENERATOR, GENERATORS_BY_NODE, SKIPPED_BY_NODE = ORDERS = "generator", "generators by node", "skipped by node"
"""The keys in `resources_of` of what makes the orders of a dataset's shuffles, and of how many a node's has skipped."""

DECIDING = ("Filter", "GroupByWindow", "TakeWhile")
"""Operations whose functions decide which elements there are, and where they go."""

IS_INTERNAL = "is internal"
"""The key in `resources_of` of a dataset that kdist iterates by itself."""

BY_HAND, SKIPPED = "iterations by hand", "skipped"
"""The keys of how many orders of a seeded shuffle have been made by hand: on this rank, and as rank 0 has said."""


def resources_of(dataset: Any) -> dict[Any, Any]:
    """Returns what kdist keeps as long as a dataset object lives, by any key: a second `fit` finds it there."""
    kept: dict[Any, Any] = dataset.__dict__.setdefault("_kdist_resources", {})
    return kept
