"""Random losses that a step, a metric or `compute_loss` computes by hand from rows: N ranks against one process.

Rows of the outputs and targets go through operations, of which some relate rows to each other, and end in a number; two
such numbers may be combined. All of it may be in a `tf.function`. A case is three examples that hypothesis draws from a
seed, the same on all ranks. Nothing may be reported: each of them is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from hypothesis import strategies as st
from keras import ops

from tests.training.features.own_losses import by_hand, models_of, silently_both
from tests.training.random_programs import case

NUM_CASES = 50

SOURCES: dict[str, Callable[[Any, Any], Any]] = {
    "outputs": lambda t, p: p,
    "targets": lambda t, p: t,
    "differences": lambda t, p: t - p,
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "tanh": ops.tanh,
    "squares": lambda x: x**2,
    "logarithms": lambda x: ops.log1p(ops.abs(x)),
    "of one length": lambda x: x / (0.1 + ops.norm(x, axis=1, keepdims=True)),
    "softmax of each": lambda x: ops.softmax(x, axis=1),
    "softmax over rows": lambda x: ops.softmax(x, axis=0),
    "centered": lambda x: x - ops.mean(x, axis=0),
    "shares": lambda x: x / (1 + ops.sum(ops.abs(x))),
    "by their maximum": lambda x: x / (1 + ops.max(ops.abs(x), axis=0)),
    "where positive": lambda x: ops.where(x > 0, x, 0.1 * x),
    "chosen": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "sorted": lambda x: ops.sort(x, axis=0),
    "added up": lambda x: 0.1 * ops.cumsum(x, axis=0),
    "backwards": lambda x: x[::-1],
    "by pairs": lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x) / 10,
    "the first": lambda x: x[:4],
    "a column": lambda x: x[:, :1] * x,
    "the largest": lambda x: tf.gather(x, tf.math.top_k(x[:, 0], 2).indices),
    "one after another": lambda x: ops.concatenate([x, 2 * x], axis=0),
    "each twice": lambda x: ops.reshape(ops.repeat(x, 2, axis=0), (-1, ops.shape(x)[1])),
    "beside each other": lambda x: ops.concatenate([x, x**2], axis=1)[:, 1:3],
    "in a function": lambda x: tf.function(lambda rows: rows - ops.max(rows, axis=0))(x),
    "in a scan": lambda x: tf.map_fn(lambda row: row * ops.sum(row), x),
    "in a branch": lambda x: tf.cond(ops.max(x) > 0.3, lambda: x, lambda: 2 * x),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "mean": ops.mean,
    "sum": lambda x: 0.01 * ops.sum(x),
    "maximum": ops.max,
    "minimum": ops.min,
    "soft maximum": ops.logsumexp,
    "spread": ops.std,
    "median": lambda x: ops.median(x[:, 0]),
    "of pairs": lambda x: ops.mean(ops.matmul(x, ops.transpose(x))),
    "norm": lambda x: ops.sqrt(0.01 + ops.sum(x**2)),
    "root": lambda x: ops.sqrt(0.01 + ops.mean(x**2)),
    "masked": lambda x: ops.sum(ops.where(x > 0, x, 0)) / (1 + ops.sum(ops.cast(x > 0, x.dtype))),
    "of maxima": lambda x: ops.mean(ops.max(x, axis=0)),
    "of each row's maximum": lambda x: ops.mean(ops.max(x, axis=1)),
    "of each row": lambda x: ops.mean(ops.logsumexp(x, axis=1)),
    "product": lambda x: ops.prod(0.9 + 0.1 * ops.tanh(x)),
    "covariance": lambda x: ops.sum((ops.transpose(x) @ x / ops.cast(ops.shape(x)[0], x.dtype)) ** 2),
    "times the number of rows": lambda x: ops.cast(ops.shape(x)[0], x.dtype) / 10 * ops.mean(x),
    "in a function": lambda x: tf.function(lambda rows: ops.mean(rows**2) * ops.max(rows))(x),
    "in a branch": lambda x: tf.cond(ops.max(x) > 0.3, lambda: ops.mean(x**2), lambda: 0.01 * ops.sum(x**2)),
    "in a loop": lambda x: tf.while_loop(
        lambda column, _: column < 2,
        lambda column, total: (column + 1, total + ops.max(x[:, column])),
        (0, tf.zeros((), x.dtype)),
    )[1],
}
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: 0.5 * a - b / 3,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / (1 + ops.abs(b)),
    "larger": ops.maximum,
    "damped": lambda a, b: a * ops.exp(-ops.abs(b)),
    "chosen": lambda a, b: ops.where(a > b, a, 2 * b),
}

Number = tuple[str, Sequence[str], str]


def numbers(sources: Sequence[str]) -> st.SearchStrategy[Number]:
    steps = st.lists(st.sampled_from(sorted(OF_ROWS)), max_size=2)
    return st.tuples(st.sampled_from(sources), steps, st.sampled_from(sorted(NUMBERS)))


@st.composite
def losses(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "first": draw(numbers(["differences", "outputs"])),  # which have a gradient
        "second": draw(st.none() | numbers(sorted(SOURCES))),
        "together": draw(st.sampled_from(sorted(TOGETHER))),
        "in a function": draw(st.booleans()),
        "model": draw(st.integers(0, 2)),
        "shape": draw(st.sampled_from(["even", "ragged", "one short"])),
    }


def loss_of(drawn: dict[str, Any]) -> Callable[[Any, Any], Any]:
    def number(parts: Number, t: Any, p: Any) -> Any:
        source, steps, last = parts
        x = SOURCES[source](t, p)
        for step in steps:
            x = OF_ROWS[step](x)
        return NUMBERS[last](x)

    def loss(t: Any, p: Any) -> Any:
        first = number(drawn["first"], t, p)
        return TOGETHER[drawn["together"]](first, number(drawn["second"], t, p)) if drawn["second"] else first

    return (lambda t, p: tf.function(loss)(t, p)) if drawn["in a function"] else loss


def compare(drawn: dict[str, Any]) -> None:
    silently_both(by_hand(models_of(loss_of(drawn))[drawn["model"]], drawn["shape"]))


RANDOM_LOSSES = {f"random_losses_{number}": case(number, losses(), compare) for number in range(NUM_CASES)}
