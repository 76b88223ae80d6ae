"""A rank that sums in shared memory: values for all ranks go out as lines of JSON, and come back as lists."""

import json
import os
import sys
import time

import numpy as np

from kdist.engines.arrays.fusion import part_bounds
from kdist.engines.arrays.shared_memory import END, PIECE_BYTES, SharedMemory
from kdist.errors import EngineError


def gather(value):
    print(json.dumps(value), flush=True)
    return json.loads(sys.stdin.readline())


def buffers(rank, seed):
    """Returns arrays of all dtypes, of sizes at and around those of a piece."""
    generator = np.random.default_rng([rank, seed])
    made = []
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        step = PIECE_BYTES // np.dtype(dtype).itemsize
        for size in (0, 1, 2, 7, step - 1, step, step + 1, 3 * step + 5):
            made.append((1000 * generator.standard_normal(size)).astype(dtype))
    return made


def sums(memory, rank, size):
    for seed in range(2):
        everyone = [buffers(each, seed) for each in range(size)]
        totals = [buffer.copy() for buffer in everyone[rank]]
        memory.sum(*totals)
        for place, total in enumerate(totals):
            expected = everyone[0][place]
            for each in range(1, size):  # in rank order, to the bit
                expected = expected + everyone[each][place]
            np.testing.assert_array_equal(total, expected)
            assert total.dtype == expected.dtype
    print("done", flush=True)


def gathers(memory, rank, size):
    for length in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 3):
        everyone = [np.full((length + each, 2), each, np.uint8) for each in range(size)]
        numbers = [np.arange(each, dtype=np.int64) for each in range(size)]
        bytes_of_all, numbers_of_all = memory.allgather([everyone[rank], numbers[rank]])
        np.testing.assert_array_equal(bytes_of_all, np.concatenate(everyone))
        np.testing.assert_array_equal(numbers_of_all, np.concatenate(numbers))
        total = np.full(length, rank, np.int32)
        memory.sum(total)  # in turns with sums, in the same slots
        np.testing.assert_array_equal(total, np.full(length, sum(range(size)), np.int32))
    print("done", flush=True)


def rows(memory, rank, size):
    for dtype in (np.float16, np.float32, np.int64):
        step = PIECE_BYTES // np.dtype(dtype).itemsize
        shapes = [(0, 3), (1,), (size, 2), (5, 7), (step + 1,), (2 * step + 3,)]
        everyone = [
            [_whole_numbers(shape, dtype, [each, place]) for place, shape in enumerate(shapes)] for each in range(size)
        ]
        mine = memory.reduce_scatter(everyone[rank])
        for place, summed in enumerate(mine):
            bounds = part_bounds(shapes[place][0], size)
            expected = sum(everyone[each][place].astype(np.float64) for each in range(size))
            np.testing.assert_array_equal(summed, expected[bounds[rank] : bounds[rank + 1]])
            assert summed.dtype == dtype
        memory.sum(np.ones(step, dtype=np.float32))  # in turns with sums, in the same slots
    print("done", flush=True)


def _whole_numbers(shape, dtype, seed):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


def differs_in_kind(memory, rank, size):
    if rank == size - 1:
        memory.allgather([np.ones(10, np.float32)])
    memory.sum(np.ones(10, np.float32))


def ends(memory, rank, size):
    if rank == size - 1:
        memory.meet(END)
    memory.sum(np.ones(1, np.float32))


def _descriptors():
    return sorted(int(each) for each in os.listdir("/proc/self/fd"))


def differs(memory, rank, size):
    memory.sum(np.ones(10 + (rank == size - 1), np.float32))


def goes_on_after_a_difference(memory, rank, size):
    try:
        memory.sum(np.ones(10 + rank, np.float32))
    except EngineError:
        total = np.ones(3, np.float32)
        memory.sum(total)
        assert total.tolist() == [size] * 3
        print("done", flush=True)


def dies(memory, rank, size):
    if rank == size - 1:
        os._exit(0)
    memory.sum(np.ones(10, np.float32))


def dies_and_leaves_a_child(memory, rank, size):
    if rank == size - 1:
        if os.fork() == 0:
            os.close(1)  # the test reads to the end
            time.sleep(20)
        os._exit(0)
    memory.sum(np.ones(10, np.float32))


def forks_twice(memory, rank, size):
    """A child's child keeps what the child has opened under the numbers of the pipes that it has closed."""
    if os.fork() == 0:
        os.close(1)
        opened = [os.pipe() for _ in range(8)]
        if os.fork() == 0:
            for _, write in opened:
                os.write(write, b"1")  # an error if it is closed
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    memory.sum(np.ones(10, np.float32))
    print("done", flush=True)


def stops(memory, rank, size):
    if rank == size - 1:
        time.sleep(5)
    memory.sum(np.ones(10, np.float32))


def differs_in_dtype(memory, rank, size):
    memory.sum(np.ones(10, np.int32 if rank else np.float32))


ACTIONS = {
    each.__name__: each
    for each in (
        sums,
        gathers,
        rows,
        differs,
        differs_in_kind,
        differs_in_dtype,
        ends,
        goes_on_after_a_difference,
        dies,
        dies_and_leaves_a_child,
        forks_twice,
        stops,
    )
}


def main(action, rank, size):
    if action == "hidden" and rank == size - 1:
        del os.memfd_create  # as where the kernel has none
    before = _descriptors()
    memory = SharedMemory.open(rank, size, gather, 1.0 if action == "stops" else None)
    if action == "hidden":
        assert memory is None
        assert _descriptors() == before
        print("done", flush=True)
        return
    try:
        ACTIONS[action](memory, rank, size)
    except EngineError as error:
        print(f"failed: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
