"""Summaries of an input, by which ranks compare whether they were given the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.graphs.captures import random_states, table_entries, values_captured
from kdist.data.graphs.dataset_internals import DECIDING, attributes, functions, kind, with_inputs

_ROWS = 16
_SEED = 4  # the most integers that a seed has


def sample_rows(num_rows: int) -> Any:
    """Returns the numbers of some rows, evenly spaced, an array of `int64`."""
    return np.linspace(0, num_rows - 1, num=min(num_rows, _ROWS), dtype=np.int64)


def row_means(rows: Any) -> str:
    """Returns the means of rows to three digits, or strings themselves.

    They differ with another order or another split of the samples, but not with another processor's rounding.
    """
    if rows.dtype.kind in "OSU":
        return repr(rows.ravel()[:_ROWS].tolist())
    means = rows.reshape(len(rows), -1).astype(np.float64).mean(axis=1) if rows.size else []
    return " ".join(f"{mean:.3g}" for mean in means)


_RANDOM = ("Random", "Shuffle")  # kinds of dataset operations
_SEEDS = " of seeds "


def is_of_seeds(summary: str) -> bool:
    """Returns whether an entry of `fingerprint_of_pipeline` is of a random operation, not of rows."""
    return summary.startswith(tuple(f"{name}{_SEEDS}" for name in _RANDOM))  # text in rows begins with a bracket


def fingerprint_of_targets(batch: Any) -> list[str]:
    """Returns the means of some targets of a batch `(x, y)` or `(x, y, sample_weight)`; of others nothing."""
    targets = batch[1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
    leaves = [leaf for leaf in tf.nest.flatten(targets) if hasattr(leaf, "__array__")]
    return [row_means(rows[sample_rows(len(rows))]) for rows in map(np.asarray, leaves) if rows.ndim]


def fingerprint_of_pipeline(dataset: Any) -> list[str]:
    """Returns the seeds of a `tf.data` pipeline, and the means of some rows of the tensors that it begins with.

    The dataset is not iterated. What cannot be read of it is left out.
    """
    found: list[str] = []
    try:
        for each in with_inputs(dataset):
            op = attributes(each)
            if kind(each) in _RANDOM:
                found.append(f"{kind(each)}{_SEEDS}{int(op.seed)}, {int(op.seed2)}")
            elif kind(each) == "TensorSlice":
                leaves = [leaf for leaf in op.tensors if leaf.dtype.name != "variant"]
                # Without a copy of all rows.
                found += [row_means(tf.gather(leaf, sample_rows(len(leaf))).numpy()) for leaf in leaves]
    except (AttributeError, TypeError, ValueError):
        return []
    return found


def fingerprint_of_functions(dataset: Any) -> list[str]:
    """Returns summaries of the lookup tables, variables and tensors that the functions of a pipeline capture.

    The states of random generators, and what may be their seeds, are left out where they may differ: not where they
    decide which elements there are.
    """
    found: list[str] = []
    try:
        called = [(each, function) for each in with_inputs(dataset) for function in functions(each)]
        for step, function in called:
            if kind(step) in DECIDING and (states := random_states(function)):
                found.append(f"random states {states} in {kind(step)}")
            for keys, values in table_entries(function):
                order = np.argsort(keys)
                entries = repr((keys[order].tolist(), values[order].tolist()))
                found.append(
                    f"{len(keys)} entries from {keys[order][:3].tolist()} on ({zlib.crc32(entries.encode()):x})"
                )
            for value in map(np.atleast_1d, values_captured(function)):
                if value.dtype.kind not in "iu" or value.size > _SEED:
                    found.append(row_means(value[sample_rows(len(value))]))
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):
        return []
    return found
