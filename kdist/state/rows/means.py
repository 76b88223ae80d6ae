"""Whether a number is a mean over rows by the operations that compute it, where made-up rows show nothing."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.row_free import RowFree
from kdist.state.rows.means_and_sums import QUOTIENTS, MeansAndSums, has_rows

_LINEAR = (
    *("Add", "AddV2", "AddN", "Sub", "Pack", "ConcatV2", "Identity", "IdentityN", "Cast", "Neg"),
    *("Mean", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"),
)
_MAX_STEPS = 200


def is_mean(value: tf.Tensor, found: MeansAndSums, fixed: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> bool:
    """Returns whether a number is a weighted sum of means over the first axis, or of sums over the number of rows.

    Args:
        value: symbolic tensor.
        found: `MeansAndSums` of the data.
        fixed: sequence of tensors that do not count as computed from rows.
        means: sequence of tensors that count as means over rows.
    """
    free = RowFree(fixed, found.depends_on_rows)
    known = {tensor_key(each) for each in means}
    pending, steps = [value], 0
    while pending:
        tensor = pending.pop()
        operation, steps = tensor.op, steps + 1
        inputs = [each for each in operation.inputs if not free(each)]
        if tensor_key(tensor) in known or (operation.type == "Mean" and _reduces_first_axis(operation)):
            continue
        if steps > _MAX_STEPS or any(map(has_rows, inputs)):
            return False
        if operation.type in QUOTIENTS and len(inputs) == 2 and found.is_number_of_rows(inputs[1]):
            if inputs[0].op.type != "Sum" or not _reduces_first_axis(inputs[0].op):
                return False
        elif operation.type in _LINEAR or (len(inputs) == 1 and _is_scaled(operation, inputs[0])):
            pending += inputs
        else:
            return False
    return True


def _reduces_first_axis(operation: tf.Operation) -> bool:
    axes = tf.get_static_value(operation.inputs[1])
    shape = operation.inputs[0].shape
    return bool(shape.rank) and shape[0] is None and axes is not None and 0 in (axes % shape.rank)


def _is_scaled(operation: tf.Operation, value: tf.Tensor) -> bool:
    return operation.type == "Mul" or (operation.type in QUOTIENTS and operation.inputs[0] is value)
