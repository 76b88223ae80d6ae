"""Packing and unpacking is the identity, and depends on nothing but shapes and dtypes."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdist.engines.arrays import fusion
from kdist.engines.tensors import flat

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, ["float16", "float32", "float64", "complex64", "complex128"]),
    *map(np.dtype, ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]),
    BFLOAT16,
]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def bits(array):
    return array.dtype, array.shape, array.tobytes()


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES)
    if draw(st.integers(0, 20)) == 0:
        shape = (fusion.LARGE_BYTES // dtype.itemsize + draw(st.integers(-1, 3)),)
    seed = draw(st.integers(0, 2**32))
    return (np.random.default_rng(seed).standard_normal(shape) * 50).astype(dtype)


lists = st.lists(arrays(), max_size=12)


@given(lists)
def test_unpack_undoes_pack(given_arrays):
    before = [bits(array) for array in given_arrays]
    unpacked = fusion.unpack(fusion.pack(given_arrays), given_arrays)
    assert [bits(array) for array in unpacked] == before
    assert [bits(array) for array in given_arrays] == before


@given(lists)
def test_the_buffers_depend_on_shapes_and_dtypes_alone(given_arrays):
    others = [np.zeros_like(array) for array in given_arrays]
    plan = [(buffer.dtype, buffer.shape) for buffer in fusion.pack(given_arrays)]
    assert [(buffer.dtype, buffer.shape) for buffer in fusion.pack(others)] == plan


@given(lists)
def test_small_arrays_share_a_buffer_for_each_dtype_of_the_sum(given_arrays):
    buffers = fusion.pack(given_arrays)
    assert all(buffer.ndim == 1 and buffer.flags.c_contiguous for buffer in buffers)
    assert sum(buffer.size for buffer in buffers) == sum(array.size for array in given_arrays)
    wire = [fusion.sum_dtype(array.dtype) for array in given_arrays]
    large = [dtype.itemsize * array.size >= fusion.LARGE_BYTES for dtype, array in zip(wire, given_arrays, strict=True)]
    small = {dtype for dtype, alone in zip(wire, large, strict=True) if not alone}
    assert len(buffers) == sum(large) + len(small)


@given(lists)
def test_no_buffer_shares_memory_with_what_was_packed(given_arrays):
    for buffer in fusion.pack(given_arrays):
        assert not any(np.shares_memory(buffer, array) for array in given_arrays)


@given(lists)
def test_what_a_graph_joins_is_the_same_message(given_arrays):
    """One rank may run a graph, and another one the same call eagerly: what they send must fit together."""
    joined = []

    def send(buffers):
        joined.extend(flat.to_array(each) for each in buffers)
        return buffers

    results = flat.sum_together([tf.constant(array) for array in given_arrays], send)
    assert [bits(buffer) for buffer in fusion.pack(joined)] == [bits(buffer) for buffer in fusion.pack(given_arrays)]
    assert [bits(flat.to_array(result)) for result in results] == [bits(array) for array in given_arrays]


@given(lists)
def test_from_bytes_undoes_to_bytes(given_arrays):
    shapes, dtypes = [array.shape for array in given_arrays], [array.dtype for array in given_arrays]
    buffer = fusion.to_bytes(given_arrays)
    assert buffer.nbytes == fusion.byte_length(shapes, dtypes)
    restored = fusion.from_bytes(buffer, shapes, dtypes)
    assert [bits(array) for array in restored] == [bits(array) for array in given_arrays]
    assert all(array.flags.aligned for array in restored)


@given(st.integers(0, 1000), st.integers(1, 500), st.sampled_from(DTYPES))
def test_pieces_cover_the_buffer_in_order(size, piece_bytes, dtype):
    buffer = np.arange(size).astype(dtype)
    cut = list(fusion.pieces(buffer, piece_bytes))
    assert all(0 < piece.nbytes <= max(piece_bytes, dtype.itemsize) for piece in cut)
    assert all(np.shares_memory(piece, buffer) for piece in cut)
    assert bits(np.concatenate([*cut, buffer[:0]])) == bits(buffer)


def test_halves_are_summed_in_float32_beside_float32():
    halves = [np.full((3,), 1.5, np.float16), np.float32([1, 2]), np.full((2, 1), 2.5, BFLOAT16)]
    (buffer,) = fusion.pack(halves)
    np.testing.assert_array_equal(buffer, np.float32([1.5, 1.5, 1.5, 1, 2, 2.5, 2.5]))
    assert buffer.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.complex128])
@pytest.mark.parametrize("size", [0, 1, 1_000_003])
def test_new_buffers_are_aligned_for_tensorflow(size, dtype):
    buffer = fusion.empty(size, dtype)
    assert (buffer.shape, buffer.dtype) == ((size,), dtype)
    assert size == 0 or buffer.ctypes.data % fusion.ALIGNMENT == 0


def test_nothing_packs_to_nothing():
    assert fusion.pack([]) == []
    assert fusion.unpack([], []) == []
    assert fusion.to_bytes([]).size == 0
