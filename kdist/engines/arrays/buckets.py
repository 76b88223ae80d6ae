"""Which tensors are sent together in one message."""

from __future__ import annotations

from collections.abc import Sequence

PARTS_MB = 8.0
"""Megabytes of a message of gradients whose sums are in parts, unless `bucket_mb` says otherwise."""


def assign_buckets(sizes: Sequence[int], bucket_mb: float | None) -> list[list[int]]:
    """Returns which tensors share a bucket, from the last tensor to the first; a bucket is closed once it is full.

    Args:
        sizes: sequence of ints, the tensors' bytes, in the order of the layers.
        bucket_mb: float or `None`, the megabytes at which a bucket is full; `None` for one bucket.

    Returns:
        A list of lists of indices into `sizes`.

    Example:
    >>> assign_buckets([8, 1_000_000, 1_000_000, 40], bucket_mb=1.0)
    [[3, 2], [1], [0]]
    """
    if bucket_mb is None:
        return [list(range(len(sizes)))]
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled >= bucket_mb * 1e6:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets
