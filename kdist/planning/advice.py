"""The least change with which a training fits in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kdist.planning.memory import ALL_REDUCE, BOTH, IN_PARTS, SERVERS, TABLE_BYTES, TABLES, Sizes, readable, shares

REMAT, HALF = 0.45, 0.5
"""What is left of the activations: measured with `keras.RematScope` on an MLP, and in numbers of 16 bits."""

_REMAT, _HALF = "RematScope", "mixed_bfloat16"
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
    for text, changed, at, under in changes(sizes, ranks, strategy):
        if peak(changed, at, under) <= memory:
            return text
    under = _least(sizes, strategy)[1] if ranks > 1 else ALL_REDUCE
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


def changes(sizes: Sizes, ranks: int, strategy: str) -> Iterator[tuple[str, Sizes, int, str]]:
    """Yields changes, the least first: what to write, and the sizes, ranks and strategy that follow.

    Each word to write counts one, and so does each halving of the batch. Of as many, those that keep the batch come
    first, and of these the ones that cost least. More ranks are the last.

    Args:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
        strategy: str, the one that does not fit.
    """
    options = [option for option in _options(sizes) if ranks > 1 and _adds(option[1], strategy)]
    found: list[tuple[int, str, Sizes, str]] = []
    for halvings, batch in enumerate(_batches(sizes.batch_size)):
        for kept, leaner in ((1.0, ()), (REMAT, (_REMAT,)), (HALF, (_HALF,)), (REMAT * HALF, (_REMAT, _HALF))):
            for words, under in [((), strategy), *options]:
                texts = [*words, *leaner, *([f"batch_size={batch}"] if halvings else [])]
                changed = dataclasses.replace(sizes, batch_size=batch, row=round(sizes.row * kept))
                found.append((len(words) + len(leaner) + halvings, ", ".join(texts), changed, under))
    for number, text, changed, under in sorted(found, key=lambda each: each[0]):
        if number:
            yield text, changed, ranks, under
    if strategy == SERVERS:
        return
    more = [ranks << place for place in range(1, _MOST_RANKS.bit_length())]
    words, under = _least(sizes, strategy)
    small = _lean(dataclasses.replace(sizes, batch_size=1))
    for also, changed in (((), sizes), ((_REMAT, _HALF, "batch_size=1"), small)):
        for at in more:
            yield ", ".join([*words, *also, f"-np {at}"]), changed, at, under


def _options(sizes: Sizes) -> list[tuple[tuple[str, ...], str]]:
    """Returns the ways to have state in parts, what to write and the strategy; the last one takes the least memory."""
    tables = f"{TABLES}={TABLE_BYTES:.0e}".replace("+0", "")
    slots: list[tuple[tuple[str, ...], str]] = [((IN_PARTS,), IN_PARTS)] if sizes.takes_parts else []
    if not sizes.tables or not sizes.trained:
        return slots
    return [*slots, ((tables,), TABLES), *([((IN_PARTS, tables), BOTH)] if slots else [])]


def _least(sizes: Sizes, strategy: str) -> tuple[tuple[str, ...], str]:
    """Returns the way to have state in parts that takes the least memory; a strategy itself where there is none."""
    options = _options(sizes)
    return options[-1] if options else ((), strategy)


def _adds(option: str, strategy: str) -> bool:
    """Returns whether a way to have state in parts is a strategy and something more."""
    return strategy == ALL_REDUCE or (option == BOTH and strategy in (IN_PARTS, TABLES))


def _batches(batch: int) -> Iterator[int]:
    """Yields a batch, and its halves down to 1."""
    yield batch
    while batch > 1:
        batch //= 2
        yield batch


def _lean(sizes: Sizes) -> Sizes:
    return dataclasses.replace(sizes, row=round(sizes.row * REMAT * HALF))
