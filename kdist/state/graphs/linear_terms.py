"""The scalars of a graph of which a scalar is the weighted sum."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def linear_terms(
    value: tf.Tensor, is_factor: Callable[[tf.Tensor], bool], is_term: Callable[[tf.Tensor], bool]
) -> list[tuple[tf.Tensor, Any]]:
    """Returns the scalars of a graph whose weighted sum a scalar is, each with its weight, a number or a scalar.

    Additions, subtractions, and multiplications and divisions by factors are followed back to what is no such
    operation.

    Args:
        value: symbolic tensor. One that is no scalar is its own only term.
        is_factor: callable that takes a scalar of the graph and returns whether it may be a part of a weight.
        is_term: callable that takes a tensor of the graph and returns whether it is not followed further back.
    """
    places = {operation.name: place for place, operation in enumerate(value.graph.get_operations())}
    weights: dict[str, Any] = {value.name: 1.0}
    tensors = {value.name: value}
    pending = [(-places[value.op.name], value.name)]  # later operations first: each once, with its whole weight
    found = []
    while pending:
        _, name = heapq.heappop(pending)
        tensor, weight = tensors[name], weights[name]
        parts = [] if is_term(tensor) else list(_parts(tensor, weight, is_factor))
        if not parts:
            found.append((tensor, weight))
        for part, of_part in parts:
            if part.name in weights:
                weights[part.name] = weights[part.name] + of_part
                continue
            weights[part.name], tensors[part.name] = of_part, part
            heapq.heappush(pending, (-places[part.op.name], part.name))
    return found


def _parts(tensor: tf.Tensor, weight: Any, is_factor: Callable[[tf.Tensor], bool]) -> Iterator[tuple[tf.Tensor, Any]]:
    operation, inputs = tensor.op, list(tensor.op.inputs)
    if operation.type == "Sum" and inputs[0].op.type == "Pack" and tensor.shape.rank == 0:
        inputs = list(inputs[0].op.inputs)
        if all(each.shape.rank == 0 for each in inputs):
            yield from ((each, weight) for each in inputs)
        return
    if operation.type in ("Sum", "Mean") and inputs[0].shape.rank == 0:  # of one number
        yield inputs[0], weight
        return
    if any(each.shape.rank != 0 for each in (tensor, *inputs)):
        return
    if operation.type in ("Add", "AddV2", "AddN", "Identity"):
        yield from ((each, weight) for each in inputs)
    elif operation.type == "Cast" and inputs[0].dtype.is_floating and tensor.dtype.is_floating:
        yield inputs[0], weight
    elif operation.type == "Neg":
        yield inputs[0], -weight
    elif operation.type == "Sub":
        yield inputs[0], weight
        yield inputs[1], -weight
    elif operation.type == "Mul" and any(map(is_factor, inputs)):
        factor, other = inputs if is_factor(inputs[0]) else reversed(inputs)
        yield other, _times(weight, factor)
    elif operation.type in ("Div", "RealDiv") and is_factor(inputs[1]):
        yield inputs[0], _times(weight, 1 / inputs[1])


def _times(weight: Any, factor: tf.Tensor) -> Any:
    return weight * factor if isinstance(weight, float) else tf.cast(weight, factor.dtype) * factor
