"""What a step keeps of each row: measured in growing batches, or estimated from the traced forward pass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kdist.planning.rows import tensor_spec

_IGNORED = {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape", "Squeeze", "ExpandDims"}
_ROWS = 2  # of the trace, any number
LEAST_ROWS = 4
"""Of the largest step that is measured, at the least: two steps show what a row adds."""
_VISIBLE = 2**25  # bytes: growth above it is that of the rows


def estimated_row(model: keras.Model, inputs: Any) -> int:
    """Returns the bytes of all outputs of the forward pass for a row. Nothing is computed.

    Args:
        model: `keras.Model`, built.
        inputs: nested `keras.KerasTensor`, the specs of its inputs.

    Raises:
        Exception: what the model raises where it cannot be traced with two rows.
    """
    specs = keras.tree.map_structure(lambda each: tensor_spec(each, _ROWS), inputs)
    graph = tf.function(lambda given: model(given, training=True)).get_concrete_function(specs).graph
    return sum(_size(each) for op in graph.get_operations() if op.type not in _IGNORED for each in op.outputs) // _ROWS


def _size(tensor: Any) -> int:
    shape = tensor.shape
    if not shape.is_fully_defined() or not shape.rank or shape[0] % _ROWS:
        return 0  # its size does not depend on the number of rows
    return int(shape.num_elements()) * (tensor.dtype.size or 0)


def measure(step: Callable[[int], Any], most_rows: int) -> tuple[int, int]:
    """Runs steps of more and more rows until the peak of this process shows what a row adds.

    Args:
        step: callable that takes a number of rows and runs a step.
        most_rows: int, the rows at which the measurement ends, but for 4 that it needs.

    Returns:
        The peak of a step without its rows, and what each row adds, in bytes.
    """
    for rows in (1, 2):  # traces of one, then of any number of rows
        step(rows)
    few = last = _peak(step, 2)
    rows, most_rows = 2, max(most_rows, LEAST_ROWS)
    while True:
        more = min(2 * rows, most_rows)
        now = _peak(step, more)
        if now - last > _VISIBLE:
            per_row = (now - last) / (more - rows)
            break
        rows, last = more, now
        if rows == most_rows:
            per_row = (last - few) / (most_rows - 2)  # the peak is elsewhere
            break
    per_row = max(0, round(per_row))
    return max(0, few - 2 * per_row), per_row


def _peak(step: Callable[[int], Any], rows: int) -> int:
    """Returns the peak of this process in a step, not of all time: to read the data may have taken more."""
    with contextlib.suppress(OSError):  # then it is the peak of all time
        Path("/proc/self/clear_refs").write_text("5")
    step(rows)
    return status("VmHWM")


def status(name: str) -> int:
    """Returns a number of this process from /proc/self/status.

    Args:
        name: str, as `"VmHWM"`.

    Returns:
        Bytes.
    """
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def available() -> int:
    """Returns the bytes of main memory that are free or can be freed."""
    (kilobytes,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024 * int(kilobytes)
