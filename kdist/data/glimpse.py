"""What a part of an input looks like, by which ranks can tell whether they were given the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.pipeline import with_inputs

_ROWS = 16


def places(num_rows: int) -> Any:
    """Returns the rows to look at, an array of `int64`."""
    return np.linspace(0, num_rows - 1, num=min(num_rows, _ROWS), dtype=np.int64)


def summary(rows: Any) -> str:
    """Returns means of rows to three digits, or texts themselves.

    Another order or another split of the samples shows, another processor's rounding does not.
    """
    if rows.dtype.kind in "OSU":
        return repr(rows.ravel()[:_ROWS].tolist())
    means = rows.reshape(len(rows), -1).astype(np.float64).mean(axis=1) if rows.size else []
    return " ".join(f"{mean:.3g}" for mean in means)


def of_targets(batch: Any) -> list[str]:
    """Returns what some targets of a batch look like: `(x, y)` or `(x, y, sample_weight)`, else there are none."""
    targets = batch[1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
    leaves = [leaf for leaf in tf.nest.flatten(targets) if hasattr(leaf, "__array__")]
    return [summary(rows[places(len(rows))]) for rows in map(np.asarray, leaves) if rows.ndim]


def of_pipeline(dataset: Any) -> list[str]:
    """Returns the seeds of a `tf.data` pipeline, and some rows of the tensors that it begins with.

    Nothing is drawn from it. What this TensorFlow does not show is left out.
    """
    seen: list[str] = []
    try:
        for each in with_inputs(dataset):
            kind = type(each).__name__
            if kind in ("_RandomDataset", "_ShuffleDataset"):
                seen.append(f"{kind} of seeds {int(each._seed)}, {int(each._seed2)}")
            elif kind == "_TensorSliceDataset":
                leaves = [leaf for leaf in each._tensors if leaf.dtype.name != "variant"]
                seen += [summary(leaf.numpy()[places(len(leaf))]) for leaf in leaves]
    except (AttributeError, TypeError, ValueError):
        return []
    return seen
