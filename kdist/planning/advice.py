"""The least change with which a training fits in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kdist.planning.memory import ALL_REDUCE, BOTH, IN_PARTS, SERVERS, TABLE_BYTES, TABLES, Sizes, readable, shares

REMAT, HALF = 0.45, 0.5
"""What is left of the activations: measured with `keras.RematScope` on an MLP, and in numbers of 16 bits."""

_MOST_RANKS = 1024  # times those of the plan


def advice(sizes: Sizes, ranks: int, memory: int, strategy: str = ALL_REDUCE) -> str:
    """Returns what to change so that every rank fits, or that nothing of it is enough.

    Args:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
        memory: int, the bytes that a rank may take.
        strategy: str, the one that does not fit.
    """
    if sizes.process > memory:
        return f"more memory: Python and TensorFlow alone take {readable(sizes.process)} on each rank"
    for text, changed, at, under in _changes(sizes, ranks, strategy):
        if peak(changed, at, under) <= memory:
            return text
    under = [under for _, under in _options(sizes)][-1] if ranks > 1 else ALL_REDUCE
    least = peak(dataclasses.replace(_lean(sizes), batch_size=1), ranks, under)
    return f"nothing here is enough: {readable(least)} at the least on {ranks} ranks; a smaller model"


def peak(sizes: Sizes, ranks: int, strategy: str) -> int:
    """Returns the peak of the rank that holds most.

    Args:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
        strategy: str.
    """
    return max(each.peak for each in shares(sizes, ranks) if each.strategy == strategy)


def _changes(sizes: Sizes, ranks: int, strategy: str) -> Iterator[tuple[str, Sizes, int, str]]:
    """Yields changes, the least first: what to write, and the sizes, ranks and strategy that follow."""
    for batch, smaller in _smaller(sizes):
        yield f"batch_size={batch}", smaller, ranks, strategy
    options = [option for option in _options(sizes) if ranks > 1 and _adds(option[1], strategy)]
    for text, under in options:
        yield text, sizes, ranks, under
    for text, under in options:
        for batch, smaller in _smaller(sizes):
            yield f"{text}, batch_size={batch}", smaller, ranks, under
    text, least = _options(sizes)[-1]
    under, also = (least, f"{text}, ") if options else (strategy, "")
    small = dataclasses.replace(sizes, batch_size=1)
    yield f"{also}RematScope, batch_size=1", _lean(small, precision=1.0), ranks, under
    yield f"{also}RematScope, mixed_bfloat16, batch_size=1", _lean(small), ranks, under
    more = [] if strategy == SERVERS else [ranks << place for place in range(1, _MOST_RANKS.bit_length())]
    for at in more:
        yield f"{text}, -np {at}", sizes, at, least
    for at in more:
        yield f"{text}, RematScope, mixed_bfloat16, batch_size=1, -np {at}", _lean(small), at, least


def _options(sizes: Sizes) -> list[tuple[str, str]]:
    """Returns the ways to have state in parts, what to write and the strategy; the last one takes the least memory."""
    tables = f"{TABLES}={TABLE_BYTES:.0e}".replace("+0", "")
    of_tables = [(tables, TABLES), (f"{IN_PARTS}, {tables}", BOTH)] if sizes.tables and sizes.trained else []
    return [(IN_PARTS, IN_PARTS), *of_tables]


def _adds(option: str, strategy: str) -> bool:
    """Returns whether a way to have state in parts is a strategy and something more."""
    return strategy == ALL_REDUCE or (option == BOTH and strategy in (IN_PARTS, TABLES))


def _smaller(sizes: Sizes) -> Iterator[tuple[int, Sizes]]:
    """Yields halves of the batch."""
    batch = sizes.batch_size
    while batch > 1:
        batch //= 2
        yield batch, dataclasses.replace(sizes, batch_size=batch)


def _lean(sizes: Sizes, precision: float = HALF) -> Sizes:
    return dataclasses.replace(sizes, row=round(sizes.row * REMAT * precision))
