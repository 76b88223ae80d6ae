"""Arrays of checkpoints in a file: those of NumPy's own format, in both directions, block by block."""

import numpy as np
import pytest

from kdist.checkpoint.storage.arrays import open_arrays, write_arrays
from kdist.state.part import BLOCK, DeferredArray

ARRAYS = {
    "a/matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a/turned": np.arange(12, dtype=np.int64).reshape(3, 4).T,
    "b/number": np.array(2.5),
    "b/nothing": np.zeros((0, 4), np.float16),
    "b/flags": np.array([True, False]),
    "b/large": np.arange(BLOCK // 4 + 3, dtype=np.float32).reshape(-1, 1),
}


def assert_same(found):
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert np.asarray(found[name]).dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array, strict=True)


def test_numpy_reads_what_is_written_and_so_do_we(tmp_path):
    rows = iter(np.split(ARRAYS["b/large"], [1, 5]))
    deferred = DeferredArray(ARRAYS["b/large"].shape, np.float32, lambda receivers: rows)
    with open(tmp_path / "arrays.npz", "wb") as file:
        write_arrays(file, {**ARRAYS, "b/large": deferred}, [0])
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as found:
        assert_same(found)
    assert_same(open_arrays(tmp_path / "arrays.npz"))


def test_files_that_numpy_wrote_are_read_too(tmp_path):
    np.savez(tmp_path / "arrays.npz", **ARRAYS)
    assert_same(open_arrays(tmp_path / "arrays.npz"))


def test_large_arrays_are_read_block_by_block(tmp_path):
    np.savez(tmp_path / "arrays.npz", **ARRAYS)
    sizes = [len(block) for block in open_arrays(tmp_path / "arrays.npz")["b/large"].blocks()]
    assert sizes == [BLOCK // 4, 3]


def test_other_ranks_parts_are_made_after_an_error_too(tmp_path):
    made = []
    deferred = DeferredArray((1,), np.float32, lambda receivers: made.append(receivers) or [np.zeros(1, np.float32)])
    with open(tmp_path / "arrays.npz", "wb") as file:
        file.close()
        with pytest.raises(ValueError, match="closed file"):
            write_arrays(file, {"a": deferred, "b": deferred}, [0, 2])
    assert made == [[0, 2], [0, 2]]
