"""Parts of weights are loaded, updated and gathered in turn."""

import time

import keras
import numpy as np
import tensorflow as tf

from kdist.keras_hooks.variables import raw_variable
from kdist.sharding.part import make_parts
from kdist.sharding.part_updates import PartUpdates


class Decaying(keras.optimizers.SGD):
    def _apply_weight_decay(self, variables):
        for variable in variables:
            variable.assign(variable * 0.5)


def test_parts_are_loaded_when_the_group_before_the_last_is_gathered():
    weights = [keras.Variable(np.full((16, 16), place, "float32")) for place in range(5)]
    parts = make_parts(weights, 1, 0, is_elementwise=True)
    place_of = {id(part): place for place, part in enumerate(parts)}
    notes, optimizer = [], Decaying()

    def noted(what, value, seconds=0.0):
        def note(array):
            time.sleep(seconds)
            notes.append(what)
            return array

        # Not stateful: TensorFlow would order these by itself.
        return tf.ensure_shape(tf.numpy_function(note, [value], value.dtype, stateful=False), value.shape)

    def apply_grad_to_update_var(variable, place, one):
        variable.assign_add(noted(("update", place), tf.fill(variable.shape, one)))

    def gather(group):
        assigned = []
        for part in group:
            value = noted(("gather", place_of[id(part)]), tf.identity(raw_variable(part.variable)), 0.05)
            assigned.append(raw_variable(part.weight).assign(value, read_value=False))
            part.free()
        return assigned

    @tf.function
    def step(one):  # which is not known in the graph: constants would be computed before it runs
        updates = PartUpdates(parts, gather, bucket_mb=1e-4)
        with updates.decaying_in_turn(optimizer):
            optimizer._apply_weight_decay([part.variable for part in parts])
            for place, part in enumerate(parts):
                updates.run(apply_grad_to_update_var, raw_variable(part.variable), place, one)

    step(tf.constant(1.0))
    for place in range(2, 5):
        assert notes.index(("gather", place - 2)) < notes.index(("update", place)), notes
    for place, weight in enumerate(weights):
        np.testing.assert_array_equal(weight, np.full((16, 16), 0.5 * place + 1))
    assert all(raw_variable(part.variable).read_value().shape[0] == 0 for part in parts)
