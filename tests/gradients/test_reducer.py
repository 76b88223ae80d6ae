"""Which gradients share a message: a pure function of their sizes. What becomes of them: tests/training/features/."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from kdist.engines.arrays.buckets import assign_buckets
from kdist.engines.single import SingleEngine
from kdist.gradients.reducer import GradientReducer, make_compression

sizes = st.lists(st.integers(0, 10_000_000), max_size=30)


def test_all_are_one_message_unless_told():
    assert assign_buckets([5, 6, 7], None) == [[0, 1, 2]]
    assert assign_buckets([], None) == assign_buckets([], 1.0) == [[]]


def test_the_last_layers_come_first():
    assert assign_buckets([8, 1_000_000, 1_000_000, 40], 1.0) == [[3, 2], [1], [0]]


@given(sizes, st.floats(0.001, 100))
def test_each_gradient_has_one_message_and_each_message_is_full(sizes, bucket_mb):
    plan = assign_buckets(sizes, bucket_mb)
    assert [index for bucket in plan for index in bucket] == list(reversed(range(len(sizes))))
    filled = [sum(sizes[index] for index in bucket) for bucket in plan]
    assert all(each >= bucket_mb * 1e6 for each in filled[:-1])
    # None has more than it needs: without its last one it would not be full.
    for bucket, size in zip(plan, filled, strict=True):
        assert not bucket or size - sizes[bucket[-1]] < bucket_mb * 1e6


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd", "topk"])
def test_complex_gradients_are_sent_as_they_are(name):
    gradient = tf.complex(tf.random.normal([64, 64]), tf.random.normal([64, 64]))
    compression = make_compression(name, powersgd_rank=1, topk_ratio=0.01)
    wire = GradientReducer(SingleEngine(), compression=compression)
    [total], _ = wire.sum([gradient], [], variables=[tf.Variable(gradient)])
    np.testing.assert_array_equal(total, gradient)
