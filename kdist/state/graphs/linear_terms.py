"""The scalars of a graph of which a scalar is the weighted sum."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import tensorflow as tf


def linear_terms(value: tf.Tensor, is_term: Callable[[tf.Tensor], bool]) -> list[tuple[tf.Tensor, float]]:
    """Returns the scalars of a graph whose weighted sum a scalar is, each with its weight.

    Additions, subtractions, and multiplications and divisions by constants are followed back to what is no such
    operation. What a weight of the model or a loss scale is a factor of is a term: its gradient needs both.

    Args:
        value: symbolic tensor. One that is no scalar is its own only term.
        is_term: callable that takes a tensor of the graph and returns whether it is not followed further back.
    """
    places = {operation.name: place for place, operation in enumerate(value.graph.get_operations())}
    weights = {value.name: 1.0}
    tensors = {value.name: value}
    pending = [(-places[value.op.name], value.name)]  # later operations first: each once, with its whole weight
    found = []
    while pending:
        _, name = heapq.heappop(pending)
        tensor, weight = tensors[name], weights[name]
        parts = [] if is_term(tensor) else list(_parts(tensor, weight))
        if not parts:
            found.append((tensor, weight))
        for part, of_part in parts:
            if part.name in weights:
                weights[part.name] = weights[part.name] + of_part
                continue
            weights[part.name], tensors[part.name] = of_part, part
            heapq.heappush(pending, (-places[part.op.name], part.name))
    return found


def _parts(tensor: tf.Tensor, weight: float) -> Iterator[tuple[tf.Tensor, float]]:
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
    numbers = [tf.get_static_value(each) for each in inputs]
    if operation.type in ("Add", "AddV2", "AddN", "Identity"):
        yield from ((each, weight) for each in inputs)
    elif operation.type == "Cast" and inputs[0].dtype.is_floating and tensor.dtype.is_floating:
        yield inputs[0], weight
    elif operation.type == "Neg":
        yield inputs[0], -weight
    elif operation.type == "Sub":
        yield inputs[0], weight
        yield inputs[1], -weight
    elif operation.type == "Mul" and any(each is not None for each in numbers):
        factor, other = (numbers[0], inputs[1]) if numbers[0] is not None else (numbers[1], inputs[0])
        yield other, weight * float(factor)
    elif operation.type in ("Div", "RealDiv") and numbers[1]:
        yield inputs[0], weight / float(numbers[1])
