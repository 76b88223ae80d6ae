"""Whatever the structure, shapes and dtypes of the data: all ranks together see each row once, in order."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdist.data.arrays import ArraySource
from kdist.data.generator import GeneratorSource
from kdist.data.tf_data import tf_data_source
from tests.data.ranks import in_batches, one_pass, plans

leaves = st.tuples(
    st.sampled_from(["float32", "float16", "int64", "uint8", "bool", "complex64", "str"]),
    st.lists(st.integers(0, 3), max_size=2),
)
structures = st.recursive(
    leaves.map(lambda leaf: ("leaf", leaf)),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=5,
)
sizes = {"num_rows": st.integers(1, 9), "batch_size": st.integers(1, 4), "num_shards": st.integers(1, 3)}


def filled(structure, num_rows):
    """Returns arrays of so many rows in the place of what says dtype and shape."""
    if isinstance(structure, dict):
        return {name: filled(inner, num_rows) for name, inner in structure.items()}
    if structure and structure[0] == "leaf":
        dtype, shape = structure[1]
        return np.zeros((num_rows, *shape), dtype if dtype != "str" else "S3")
    return tuple(filled(inner, num_rows) for inner in structure)


@given(structure=structures, scale_batch=st.booleans(), **sizes)
@settings(max_examples=15)
def test_every_row_once_whatever_the_structure(structure, scale_batch, num_rows, batch_size, num_shards):
    data = (np.arange(num_rows), filled(structure, num_rows))  # the first leaf numbers the rows
    ranks = plans(num_shards, scale_batch=scale_batch)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    batches = [
        tf.nest.map_structure(lambda array, rows=rows: array[rows], data) for rows in in_batches(num_rows, batch_size)
    ]
    expected = in_batches(num_rows, batch_size * (num_shards if scale_batch else 1))
    tensors = tf.nest.map_structure(tf.constant, data)
    assert one_pass([ArraySource(tensors, num_rows, batch_size, plan) for plan in ranks]) == expected
    assert one_pass([tf_data_source(dataset, plan) for plan in ranks]) == expected
    made = [GeneratorSource(lambda: batches, plan, signature=dataset.element_spec, first=batches[0]) for plan in ranks]
    assert one_pass(made) == expected
