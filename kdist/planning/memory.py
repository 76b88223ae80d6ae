"""What each rank of a strategy holds, from the sizes of one process: arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.engines.arrays.buckets import PARTS_MB
from kdist.errors import KDistError

ALL_REDUCE, IN_PARTS, SERVERS = "all-reduce", 'shard="optimizer"', "parameter server"
TABLES, BOTH = "shard_embeddings", "both in parts"
TABLE_BYTES = 10**6
"""From which on tables are counted as in parts, and `shard_embeddings` is proposed."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def is_training(method: str) -> bool:
    """Returns whether a method of a model trains it."""
    return method in ("fit", "train_on_batch")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one process holds, in bytes.

    Attributes:
        weights: int, all variables of the model.
        trained: int, those that have gradients: the bytes of the gradients.
        slots: int, the state of the optimizer.
        row: int, what the forward pass keeps of one row for the backward pass.
        batch_size: int, the rows of the user's batch.
        data: int, the arrays that the call was given.
        process: int, what the process holds besides: Python, TensorFlow, its graphs. 0 if it was not measured.
        source: str, where `row` is from: `"measured"` or `"estimated"`.
        is_elementwise: bool, whether the optimizer can update a range of a weight.
        largest: int, the bytes of the largest weight.
        tables: int, those of the trained embedding tables that `shard_embeddings` can have in parts.
        batches_per_step: int or `None`, how many of the user's batches all ranks take in a step; `None` for one each.
        takes_parts: bool, whether `shard="optimizer"` supports the optimizer and the weights.
        gathered: int, what a rank sends of a row to all ranks, which gather it.
        method: str, the method of the model that is planned.
    """

    weights: int
    trained: int
    slots: int
    row: int
    batch_size: int
    data: int = 0
    process: int = 0
    source: str = "estimated"
    is_elementwise: bool = True
    largest: int = 0
    tables: int = 0
    batches_per_step: int | None = None
    takes_parts: bool = True
    gathered: int = 0
    method: str = "fit"

    def rows(self, ranks: int) -> int:
        """Returns the most rows of a step on one rank.

        Args:
            ranks: int, how many ranks train.
        """
        return -(-self.batch_size * (self.batches_per_step or ranks) // ranks)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank holds under one strategy, in bytes.

    Attributes:
        strategy: str, `"all-reduce"`, `'shard="optimizer"'`, `"shard_embeddings"`, `"both in parts"`, which are the two
            together, or `"parameter server"`.
        rank: str, which ranks hold it, as `"each"`, `"chief"`, `"worker"` or `"server"`.
        weights, gradients, slots, messages, activations, data, process: int, what they take.
    """

    strategy: str
    rank: str
    weights: int = 0
    gradients: int = 0
    slots: int = 0
    messages: int = 0
    activations: int = 0
    data: int = 0
    process: int = 0

    @property
    def peak(self) -> int:
        """The most that the rank holds: the sum."""
        return sum(getattr(self, name) for name in PARTS)

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers, and the peak."""
        return dataclasses.asdict(self) | {"peak": self.peak}


PARTS = tuple(field.name for field in dataclasses.fields(Share) if field.name not in ("strategy", "rank"))
"""The columns of a plan."""


def shares(sizes: Sizes, ranks: int) -> list[Share]:
    """Returns what the ranks of each strategy hold; parameter servers from 3 ranks on, one of which is the server.

    Args:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
    """
    activations = sizes.row * sizes.rows(ranks)
    gathered = sizes.gathered * sizes.rows(ranks) * ranks if ranks > 1 else 0  # the rows of all ranks, on each
    common = {"data": sizes.data, "process": sizes.process}
    part = _part(sizes, ranks)
    found = [
        Share(
            ALL_REDUCE, "each", sizes.weights, sizes.trained, sizes.slots,
            sizes.trained + gathered if ranks > 1 else 0, activations, **common,
        )
    ]  # fmt: skip
    if ranks > 1 and sizes.takes_parts:
        slots, sums = round(sizes.slots * part), round(sizes.trained * part)
        messages = _in_messages(sizes.trained, sizes.largest) + gathered
        found.append(Share(IN_PARTS, "each", sizes.weights, sums, slots, messages, activations, **common))
    if ranks > 1 and sizes.tables and sizes.trained:  # nothing is trained by evaluate and predict
        away, others = round(sizes.tables * (1 - 1 / ranks)), sizes.trained - sizes.tables
        slots_of_tables = sizes.slots * sizes.tables / sizes.trained
        in_messages = _in_messages(others, sizes.largest)
        for strategy, of_others, messages in ((TABLES, 1.0, others), (BOTH, part, in_messages)):
            if strategy == BOTH and not sizes.takes_parts:
                continue
            slots = round(slots_of_tables / ranks + (sizes.slots - slots_of_tables) * of_others)
            sums = sizes.tables - away + round(others * of_others)
            found.append(
                Share(
                    strategy, "each", sizes.weights - away, sums, slots, messages + gathered, activations, **common
                )
            )  # fmt: skip
    if ranks > 2:
        # Each worker holds a copy of arrays, of which the chief sends row numbers.
        found += [
            Share(SERVERS, "chief", **common),
            Share(SERVERS, "worker", sizes.weights, sizes.trained, 0, 0, activations, **common),
            Share(SERVERS, "server", sizes.weights, 0, sizes.slots, sizes.trained, process=sizes.process),
        ]
    return found


def _in_messages(gradients: int, largest: int) -> int:
    """Returns the bytes of the gradients that are whole at a time where their sums are in parts: of two messages."""
    return min(gradients, 2 * max(largest, round(PARTS_MB * 1e6)))


def _part(sizes: Sizes, ranks: int) -> float:
    """Returns the largest rank's fraction of the weights."""
    even = 1 / ranks
    if sizes.is_elementwise or not sizes.trained:
        return even
    return min(1.0, max(even, sizes.largest / sizes.trained))  # a weight has one owner


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size, as `"24GB"`, `"800 MB"` or `"16GiB"`.

    Args:
        text: str.

    Raises:
        KDistError: if it cannot be parsed.
    """
    number = text.strip().rstrip("BbKkMmGgTtIi").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        found = float(number) * _UNITS[unit]
        if 0 < found < float("inf"):
            return int(found)
    except (ValueError, KeyError):
        pass
    raise KDistError(
        f"`memory` cannot be parsed as a size. Received: {text!r}. Expected a number above 0 with a unit: MB, "
        "GB, TB, MiB, GiB or TiB. Fix: for example 24GB."
    )


def readable(num_bytes: int) -> str:
    """Returns a size in three digits, as `"1.25 GB"`.

    Args:
        num_bytes: int.
    """
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
