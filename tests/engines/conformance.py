"""What every engine must do: cases for any number of ranks, their expectations computed from rank and size.

Bound to an engine by a test module, see `tests/helpers/spmd.py`. Each case is given the engine.
"""

import contextlib
import functools
import hashlib
import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

from kdist.errors import EngineError

HALVES = [tf.float16, tf.bfloat16]
FLOATS = [*HALVES, tf.float32, tf.float64]
INTS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
NUMBERS = [*FLOATS, *INTS, tf.complex64, tf.complex128]
ANYTHING = [*NUMBERS, tf.bool]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (4, 1, 5)]

LARGE = 1_000_003  # elements: several pieces of a large message, and a remainder


def both_ways(function):
    """Yields `(how, function)`: called eagerly, and in a `tf.function`."""
    yield "eager", function
    yield "graph", tf.function(function, autograph=False)


def values(shape, dtype, rank):
    """Returns small whole numbers, different for each rank, that all dtypes hold exactly."""
    count = int(np.prod(shape))
    array = (np.arange(count).reshape(shape) % 5 + 3 * rank + 1).astype(np.int64)
    if dtype.is_complex:
        array = array + 1j * (rank + 2)
    if dtype.is_bool:
        array = array % 2
    return tf.cast(array, dtype)


def summed(shape, dtype, size):
    wide = tf.complex128 if dtype.is_complex else tf.int64
    return tf.cast(sum(values(shape, wide, rank) for rank in range(size)), dtype)


def same(got, expected, message=""):
    """Asserts equal dtypes, shapes and values, to the bit."""
    assert got.dtype == expected.dtype, (message, got.dtype, expected.dtype)
    assert tuple(got.shape) == tuple(expected.shape), (message, got.shape, expected.shape)
    np.testing.assert_array_equal(*(x.numpy() if tf.is_tensor(x) else x for x in (got, expected)), err_msg=str(message))


def randoms(rank, dtype=np.float32, shape=(LARGE,)):
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


# Who is who


def case_ranks_are_numbered_from_0(engine):
    assert 0 <= engine.rank < engine.size
    assert engine.gather_objects(engine.rank) == list(range(engine.size))


def case_local_ranks_are_numbered_from_0_on_each_host(engine):
    import socket

    everyone = engine.gather_objects([socket.gethostname(), engine.local_rank, engine.local_size])
    here = [(rank, size) for host, rank, size in everyone if host == socket.gethostname()]
    assert sorted(here) == [(rank, len(here)) for rank in range(len(here))]


# Sums


def case_allreduce_sums_every_dtype_and_shape(engine):
    for dtype in NUMBERS:
        for how, allreduce in both_ways(engine.allreduce):
            results = allreduce([values(shape, dtype, engine.rank) for shape in SHAPES])
            assert len(results) == len(SHAPES)
            for shape, result in zip(SHAPES, results, strict=True):
                same(result, summed(shape, dtype, engine.size), (how, dtype.name, shape))


def case_allreduce_sums_any_mixture_in_the_lists_order(engine):
    kinds = list(itertools.product(SHAPES, NUMBERS))
    np.random.default_rng(0).shuffle(kinds)
    for how, allreduce in both_ways(engine.allreduce):
        results = allreduce([values(shape, dtype, engine.rank) for shape, dtype in kinds])
        for (shape, dtype), result in zip(kinds, results, strict=True):
            same(result, summed(shape, dtype, engine.size), (how, dtype.name, shape))


def case_allreduce_sums_halves_in_float32(engine):
    for dtype in HALVES:
        for shape in [(1000,), (300_000,)]:
            everyone = [tf.cast(randoms(rank, shape=shape) * 100, dtype) for rank in range(engine.size)]
            exact = sum(np.asarray(tf.cast(one, tf.float64)) for one in everyone)
            (result,) = engine.allreduce([everyone[engine.rank]])
            # Rounded once, at the end: half a unit in the last place.
            half_unit = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8}[dtype]
            np.testing.assert_allclose(np.asarray(tf.cast(result, tf.float64)), exact, rtol=half_unit * 1.01, atol=1e-7)


def case_allreduce_keeps_float64_and_int64_exact(engine):
    tiny = tf.constant([1.0 + 2.0**-50 * engine.rank, 1e300], tf.float64)
    huge = tf.constant([2**60 + engine.rank], tf.int64)
    total, whole = engine.allreduce([tiny, huge])
    ranks = range(engine.size)
    same(total, np.array([sum(1.0 + 2.0**-50 * rank for rank in ranks), sum(1e300 for _ in ranks)]))
    same(whole, np.array([sum(2**60 + rank for rank in ranks)]))


def case_allreduce_passes_on_what_is_not_finite(engine):
    mine = [np.inf if engine.rank == 0 else 1.0, np.nan if engine.rank == engine.size - 1 else 1.0, 1.0]
    for dtype in FLOATS:
        (result,) = engine.allreduce([tf.cast(mine, dtype)])
        same(tf.cast(result, tf.float32), np.array([np.inf, np.nan, engine.size], np.float32), dtype.name)


def case_allreduce_is_equal_to_the_bit_on_all_ranks_and_every_time(engine):
    """Sums are not exact, so that their order shows: what is resumed must add in the same one."""
    every_time = []
    mixture = [(np.float32, (LARGE,)), (np.float64, (LARGE // 2,)), (np.float32, (33, 7)), (np.float16, (500,))]
    mine = [tf.constant(randoms(engine.rank, dtype, shape)) for dtype, shape in mixture]
    for _, allreduce in both_ways(engine.allreduce):
        results = [np.asarray(result) for result in allreduce(mine)]
        digests = engine.gather_objects([hashlib.sha256(result.tobytes()).hexdigest() for result in results])
        assert digests == [digests[0]] * engine.size
        every_time.append(digests[0])
        for result, (dtype, shape) in zip(results, mixture, strict=True):
            everyone = [randoms(rank, dtype, shape).astype(np.float64) for rank in range(engine.size)]
            atol = np.finfo(dtype).eps * 10
            np.testing.assert_allclose(result.astype(np.float64), sum(everyone), rtol=atol, atol=atol)
    assert every_time[0] == every_time[1]


def case_allreduce_of_nothing_is_nothing(engine):
    for _, allreduce in both_ways(engine.allreduce):
        assert list(allreduce([])) == []


def case_allreduce_takes_variables(engine):
    variable = tf.Variable([1.0, 2.0])
    for _, allreduce in both_ways(lambda: engine.allreduce((variable,))):
        same(allreduce()[0], np.array([1, 2], np.float32) * engine.size)


# Slices of embedding gradients


def _slices(rank, count, dtype=tf.float32):
    return tf.IndexedSlices(
        values=values((count, 3), dtype, rank),
        indices=tf.range(count, dtype=tf.int64) + rank,
        dense_shape=tf.constant([50, 3], tf.int64),
    )


def case_allreduce_keeps_slices_in_rank_order(engine):
    counts = [(3 * rank + 2) % 5 for rank in range(engine.size)]  # unequal, and 0 on rank 1
    for dtype in FLOATS:
        for how, allreduce in both_ways(engine.allreduce):
            (result,) = allreduce([_slices(engine.rank, counts[engine.rank], dtype)])
            assert isinstance(result, tf.IndexedSlices), how
            everyone = [_slices(rank, count, dtype) for rank, count in enumerate(counts)]
            same(result.values, tf.concat([one.values for one in everyone], 0), how)
            same(result.indices, tf.concat([one.indices for one in everyone], 0), how)
            same(result.dense_shape, everyone[0].dense_shape, how)


def case_allreduce_takes_slices_among_tensors(engine):
    def mixed():
        return [
            values((2, 2), tf.float32, engine.rank),
            _slices(engine.rank, engine.rank),
            values((), tf.int32, engine.rank),
            tf.IndexedSlices(values((2,), tf.float64, engine.rank), tf.constant([4, 4])),  # without a dense shape
            values((3,), tf.float16, engine.rank),
        ]

    for how, allreduce in both_ways(lambda: engine.allreduce(mixed())):
        first, sparse, second, bare, third = allreduce()
        same(first, summed((2, 2), tf.float32, engine.size), how)
        same(second, summed((), tf.int32, engine.size), how)
        same(third, summed((3,), tf.float16, engine.size), how)
        same(sparse.values, tf.concat([_slices(rank, rank).values for rank in range(engine.size)], 0), how)
        same(bare.values, tf.concat([values((2,), tf.float64, rank) for rank in range(engine.size)], 0), how)
        same(bare.indices, np.array([4, 4] * engine.size, np.int32), how)
        assert bare.dense_shape is None


def case_allreduce_takes_the_gradient_of_an_embedding(engine):
    table = tf.Variable(tf.zeros((10, 2)))

    @tf.function(autograph=False)
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * tf.cast(engine.rank + 1, tf.float32))
        (gradient,) = engine.allreduce([tape.gradient(loss, table)])
        assert isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient)

    expected = np.zeros((10, 2), np.float32)
    for rank in range(engine.size):
        expected[rank] += rank + 1
        expected[9] += rank + 1
    same(step(tf.constant([engine.rank, 9])), expected)


# Gathering


def case_allgather_concatenates_unequal_first_dimensions(engine):
    for dtype in ANYTHING:
        for how, allgather in both_ways(engine.allgather):
            for tail in [(), (3,), (2, 0), (1, 4)]:
                (result,) = allgather([values((2 * engine.rank, *tail), dtype, engine.rank)])  # rank 0 has none
                parts = [values((2 * rank, *tail), dtype, rank) for rank in range(engine.size)]
                same(result, tf.concat(parts, 0), (how, dtype.name, tail))


def case_allgather_takes_any_mixture(engine):
    def mine(rank):
        kinds = zip(itertools.cycle([(1,), (3, 2), (0, 5), (rank + 1, 2), (2 - rank % 2,)]), ANYTHING, strict=False)
        return [values(shape, dtype, rank) for shape, dtype in kinds]

    for how, allgather in both_ways(engine.allgather):
        results = allgather(mine(engine.rank))
        for i, parts in enumerate(zip(*[mine(rank) for rank in range(engine.size)], strict=True)):
            same(results[i], tf.concat(parts, 0), (how, i))


def case_allgather_of_no_rows_anywhere(engine):
    (result,) = engine.allgather([tf.zeros((0, 4))])
    same(result, np.zeros((0, 4), np.float32))


def case_allgather_of_large_tensors(engine):
    large, small = engine.allgather([tf.constant(randoms(engine.rank)), tf.constant([engine.rank])])
    same(large, np.concatenate([randoms(rank) for rank in range(engine.size)]))
    same(small, np.arange(engine.size, dtype=np.int32))


# Rows for each rank


def case_alltoall_sends_each_row_to_its_rank(engine):
    def rows(shape, dtype, sender):
        return tf.stack([values(shape, dtype, 2 * sender + receiver) for receiver in range(engine.size)])

    kinds = list(itertools.product(SHAPES, ANYTHING))
    for how, alltoall in both_ways(engine.alltoall):
        results = alltoall([rows(shape, dtype, engine.rank) for shape, dtype in kinds])
        for (shape, dtype), result in zip(kinds, results, strict=True):
            expected = tf.stack([rows(shape, dtype, sender)[engine.rank] for sender in range(engine.size)])
            same(result, expected, (how, dtype.name, shape))
        assert list(alltoall([])) == []


def case_alltoall_of_large_tensors(engine):
    def rows(sender):
        return randoms(sender, np.float32, (engine.size, LARGE // 2))

    for how, alltoall in both_ways(engine.alltoall):
        for _ in range(2):
            (result,) = alltoall([tf.constant(rows(engine.rank))])
            same(result, np.stack([rows(sender)[engine.rank] for sender in range(engine.size)]), how)


# Broadcasting


def case_broadcast_gives_each_roots_values(engine):
    kinds = list(itertools.product(SHAPES, ANYTHING))
    for root in range(engine.size):
        for how, broadcast in both_ways(lambda *tensors, root=root: engine.broadcast(tensors, root)):
            results = broadcast(*[values(shape, dtype, engine.rank) for shape, dtype in kinds])
            for (shape, dtype), result in zip(kinds, results, strict=True):
                same(result, values(shape, dtype, root), (how, root, dtype.name, shape))


def case_broadcast_is_from_rank_0_unless_told(engine):
    same(engine.broadcast([tf.constant(engine.rank + 5)])[0], np.array(5, np.int32))


def case_broadcast_keeps_every_bit(engine):
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32)  # NaNs, -0, denormal, inf
    mine = bits.view(np.float32) if engine.rank == 0 else np.ones(5, np.float32)
    (result,) = engine.broadcast([tf.constant(mine)])
    same(np.asarray(result).view(np.uint32), bits)


def case_broadcast_of_large_tensors(engine):
    root = engine.size - 1
    large, flag, small = engine.broadcast(
        [tf.constant(randoms(engine.rank)), tf.constant(engine.rank == root), tf.constant(engine.rank)], root
    )
    same(large, randoms(root))
    assert bool(flag)
    assert int(small) == root


# Memory


def case_inputs_are_left_alone_and_results_are_the_callers_own(engine):
    for dtype in [np.float32, np.float16]:
        for size in [4, LARGE]:
            mine = tf.constant(randoms(engine.rank, dtype, (size,)))
            for how, exchange in both_ways(
                lambda x: (
                    *engine.allreduce([x]),
                    *engine.broadcast([x], engine.size - 1),
                    *engine.allgather([x]),
                    *engine.alltoall([tf.stack([x] * engine.size)]),
                )
            ):
                before = exchange(mine)
                copies = [np.array(result) for result in before]
                same(mine, randoms(engine.rank, dtype, (size,)), how)
                exchange(mine * 3)
                for result, copy in zip(before, copies, strict=True):
                    same(result, copy, how)


# In graphs


def case_results_stay_when_the_same_message_is_sent_again(engine):
    """Small tensors that share a buffer, and a large one that has its own."""
    mine = [randoms(engine.rank), tf.constant([1.0, 2.0]) * (1 + engine.rank), tf.constant([3.0]) * (1 + engine.rank)]
    totals = [sum(randoms(rank) for rank in range(engine.size))]
    totals += [np.float32(part) * sum(range(1, engine.size + 1)) for part in ([1, 2], [3])]
    times = 4

    @tf.function
    def sums(factor):
        return engine.allreduce([factor * tensor for tensor in mine])

    runs = (sums, sums.python_function)  # in a graph and eagerly, in turns: they may share memory
    kept = [[run(tf.constant(factor, tf.float32)) for run in runs] for factor in range(1, 1 + times)]
    for factor, by_run in enumerate(kept, 1):
        for results in by_run:
            for result, total in zip(results, totals, strict=True):
                np.testing.assert_allclose(result, factor * total, rtol=1e-5, atol=1e-4)

    @tf.function
    def sums_in_a_loop():
        def body(i, *arrays):
            results = engine.allreduce([tf.cast(i + 1, tf.float32) * tensor for tensor in mine])
            return [i + 1, *(array.write(i, result) for array, result in zip(arrays, results, strict=True))]

        arrays = [tf.TensorArray(tf.float32, times, element_shape=np.shape(total)) for total in totals]
        return [array.stack() for array in tf.while_loop(lambda i, *_: i < times, body, [0, *arrays])[1:]]

    for stacked, total in zip(sums_in_a_loop(), totals, strict=True):
        for factor, result in enumerate(stacked, 1):
            np.testing.assert_allclose(result, factor * total, rtol=1e-5, atol=1e-4)


def case_what_a_graph_sends_is_the_same_afterwards(engine):
    """Wherever it lies: in a constant, a variable, an argument, in what is sent twice, and in what is needed later."""
    for size in (3, LARGE):
        mine = randoms(engine.rank, shape=(size,))
        captured, variable = tf.constant(mine), tf.Variable(mine)
        exchange = tf.function(functools.partial(_sent_twice, engine, mine, captured, variable), autograph=False)
        total = sum(randoms(rank, shape=(size,)) for rank in range(engine.size))
        for _ in range(3):
            once, again, sent = exchange(captured)
            for result in (*once, *again):
                np.testing.assert_allclose(result, total, rtol=1e-5, atol=1e-5)
            for tensor in (*sent, captured, variable):
                np.testing.assert_array_equal(tensor, mine)


def _sent_twice(engine, array, captured, variable, argument):
    constant = tf.constant(array)
    made = argument * 1.0
    sent = [constant, constant * 1.0, captured, variable, variable.read_value(), argument, made, made]
    once, again = engine.allreduce(sent), engine.allreduce(sent)
    with tf.control_dependencies(again):
        return once, again, [tf.identity(tensor) for tensor in sent]


def case_static_shapes_are_kept_in_a_graph(engine):
    @tf.function(autograph=False)
    def traced():
        dense, sparse = engine.allreduce([tf.zeros((2, 3)), _slices(0, 4)])
        assert dense.shape == (2, 3)
        assert sparse.values.shape[1:] == (3,)
        if engine.size > 1:
            assert sparse.values.shape[0] is None
            assert engine.allgather([tf.zeros((4, 3))])[0].shape.as_list() == [None, 3]
        assert engine.broadcast([tf.zeros((5,), tf.bfloat16)])[0].shape == (5,)
        return dense

    traced()


def case_shapes_may_be_unknown_until_the_graph_runs(engine):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
    def exchange(anything, rows):
        return (*engine.allreduce([anything, rows]), *engine.allgather([rows]), *engine.broadcast([rows, anything]))

    for shape in [(), (3,), (2, 2)]:
        total, _, gathered, _, first = exchange(values(shape, tf.float32, engine.rank), tf.zeros((len(shape), 2)))
        same(total, summed(shape, tf.float32, engine.size))
        same(gathered, np.zeros((len(shape) * engine.size, 2), np.float32))
        same(first, values(shape, tf.float32, 0))


def _slow(x, really):
    """Returns a scalar 0 that depends on `x` and, if `really`, takes a while to compute."""
    y = tf.ones((256, 256)) * x
    for _ in range(12 if really else 0):
        y = tf.linalg.matmul(y, y) * 1e-3
    return tf.reduce_sum(y) * 0.0


def case_collectives_run_in_program_order(engine):
    # Their inputs become ready in another order on every second rank; nothing but the program orders them.
    odd = engine.rank % 2 == 1

    @tf.function(autograph=False)
    def exchange(x):
        (first,) = engine.allreduce([tf.ones((3,)) + _slow(x, odd)])
        (second,) = engine.allreduce([tf.ones((2, 2)) * 2 + _slow(x, not odd)])
        (third,) = engine.broadcast([tf.ones((5,)) * engine.rank + _slow(x, odd)], engine.size - 1)
        engine.barrier()
        (fourth,) = engine.allgather([tf.ones((engine.rank + 1,)) + _slow(x, not odd)])
        return first, second, third, fourth

    for _ in range(5):
        first, second, third, fourth = exchange(tf.constant(1e-3))
        same(first, np.full((3,), engine.size, np.float32))
        same(second, np.full((2, 2), 2 * engine.size, np.float32))
        same(third, np.full((5,), engine.size - 1, np.float32))
        same(fourth, np.ones(sum(range(engine.size + 1)), np.float32))


def case_collectives_run_in_order_in_a_loop(engine):
    @tf.function(autograph=False)
    def exchange(n):
        def body(i, total):
            # The input takes its time in iterations that differ between the ranks.
            wait = tf.cond((i + engine.rank) % 2 == 0, lambda: _slow(1e-3, True), lambda: _slow(1e-3, False))
            (one,) = engine.allreduce([tf.cast(i, tf.float32) + wait])
            (two,) = engine.allreduce([tf.fill([2], tf.cast(i * 100, tf.float32))])
            return i + 1, total.write(i, tf.concat([[one], two], 0))

        steps = tf.TensorArray(tf.float32, size=n, element_shape=(3,))
        return tf.while_loop(lambda i, _: i < n, body, (0, steps))[1].stack()

    expected = np.array([[i, 100 * i, 100 * i] for i in range(12)], np.float32) * engine.size
    for _ in range(3):
        same(exchange(tf.constant(12)), expected)


def case_collectives_run_in_a_python_loop_of_autograph(engine):
    @tf.function
    def exchange(n):
        total = tf.constant(0.0)
        for i in tf.range(n):
            if i % 2 == 0:
                total += engine.allreduce([tf.cast(i, tf.float32)])[0]
            else:
                total += tf.reduce_sum(engine.allgather([tf.fill([2], total)])[0])
            engine.barrier()
        return total

    expected = 0.0
    for i in range(6):
        expected += i * engine.size if i % 2 == 0 else 2 * engine.size * expected
    assert float(exchange(tf.constant(6))) == expected


def case_collectives_run_in_a_branch(engine):
    @tf.function(autograph=False)
    def exchange(sums):
        mine = tf.constant([1.0 + engine.rank])
        return tf.cond(sums, lambda: engine.allreduce([mine])[0], lambda: engine.broadcast([mine], engine.size - 1)[0])

    same(exchange(tf.constant(True)), np.array([sum(range(engine.size + 1))], np.float32))
    same(exchange(tf.constant(False)), np.array([engine.size], np.float32))


def case_collectives_in_branches_keep_the_programs_order(engine):
    # A branch that holds a variable is ordered by TensorFlow with what uses that variable alone.
    variable = tf.Variable(0.0)

    def exchange(x):
        one = 1.0 + _slow(x, engine.rank % 2 == 0)
        ten = 10.0 + _slow(x, engine.rank % 2 == 1)
        first = tf.cond(one > 0, lambda: variable.assign(engine.allreduce([one])[0]), variable.value)
        [second] = engine.allreduce([ten])
        return first, second

    function = tf.function(exchange, autograph=False)
    for _ in range(5):
        first, second = function(tf.constant(1e-3))
        same(first, np.float32(engine.size))
        same(second, np.float32(10 * engine.size))


def case_a_result_that_nobody_uses_is_still_exchanged(engine):
    @tf.function(autograph=False)
    def exchange(x):
        if engine.rank % 2:
            engine.allreduce([x])  # as metrics that only the chief reads
            return x
        return engine.allreduce([x])[0]

    exchange(tf.constant(2.0))
    same(engine.allreduce([tf.constant(1.0)])[0], np.array(engine.size, np.float32))


def case_one_rank_may_trace_more_often(engine):
    @tf.function(autograph=False, reduce_retracing=False)
    def total(x, _):
        return engine.allreduce([x])[0]

    for tag in range(3 * engine.rank):
        total.get_concrete_function(tf.constant(1.0), f"only here {tag}")
    same(total(tf.constant(engine.rank + 1.0), "all"), np.array(sum(range(engine.size + 1)), np.float32))


# Barrier


def case_barrier_waits_for_the_last_rank(engine):
    for _, barrier in both_ways(engine.barrier):
        barrier()  # traced
        if engine.rank == engine.size - 1:
            time.sleep(0.3)
        arrived = time.time()
        barrier()
        left = time.time()
        everyone = engine.gather_objects([arrived, left])
        assert min(left for _, left in everyone) >= max(arrived for arrived, _ in everyone)


# Objects


def case_objects_are_gathered(engine):
    def thing(rank):
        return {
            "rank": rank,
            "name": "Grüße, 世界 🌍 \u0000" * rank,
            "nested": [None, True, 1.5, {"k": []}],
            "big": 2**70,
        }

    assert engine.gather_objects(thing(engine.rank)) == [thing(rank) for rank in range(engine.size)]


def case_large_objects_are_gathered(engine):
    everyone = engine.gather_objects("ü" * (500_000 if engine.rank == 0 else engine.rank))
    assert [len(text) for text in everyone] == [500_000, *range(1, engine.size)]
    assert set("".join(everyone)) == {"ü"}


def case_objects_are_broadcast(engine):
    for root in range(engine.size):
        mine = ["größe", root, "x" * 300_000] if engine.rank == root else object()
        assert engine.broadcast_object(mine, root) == ["größe", root, "x" * 300_000]


def case_objects_travel_while_a_graph_is_traced(engine):
    seen = []

    @tf.function(autograph=False)
    def traced(x):
        seen.append(engine.gather_objects(engine.rank))
        return x

    traced(tf.constant(1.0))
    assert seen == [list(range(engine.size))]


# What is refused: at once, on the rank that is wrong, without a message to the others


def case_wrong_arguments_are_refused(engine):
    x = tf.constant([1.0])
    sparse = tf.IndexedSlices(x, tf.constant([0]))
    wrong = [
        (lambda: engine.allreduce(x), "list"),
        (lambda: engine.allreduce([x, None]), "tensor 1 of 2 is no tensor.*NoneType"),
        (lambda: engine.allreduce([tf.constant(True)]), "cannot be summed.*bool"),
        (lambda: engine.allreduce([tf.constant("text")]), "cannot be summed.*string"),
        (lambda: engine.allreduce([tf.IndexedSlices(tf.constant(["a"]), tf.constant([0]))]), "summed.*string"),
        (lambda: engine.allreduce([tf.ragged.constant([[1.0], [1.0, 2.0]])]), "Ragged"),
        (lambda: engine.allgather([x, tf.constant(1.0)]), "tensor 1 of 2.*scalar"),
        (lambda: engine.allgather([tf.constant(["text"])]), "sent.*string"),
        (lambda: engine.allgather([sparse]), "IndexedSlices"),
        (lambda: engine.allgather("text"), "list"),
        (lambda: engine.alltoall([tf.zeros((engine.size + 1, 2))]), f"no row for each rank.*{engine.size + 1}, 2"),
        (lambda: engine.alltoall([tf.constant(1.0)]), "no row for each rank"),
        (lambda: engine.alltoall([tf.constant(["text"] * engine.size)]), "sent.*string"),
        (lambda: engine.broadcast([sparse]), "IndexedSlices"),
        (lambda: engine.broadcast([tf.constant("text")]), "sent.*string"),
        (lambda: engine.broadcast([x], engine.size), f"root={engine.size}.*from 0 to {engine.size - 1}"),
        (lambda: engine.broadcast([x], -1), "root=-1"),
        (lambda: engine.broadcast([x], None), "root=None"),
        (lambda: engine.broadcast_object(1, engine.size), f"root={engine.size}"),
        (lambda: engine.gather_objects(object()), "JSON.*object"),
    ]
    for function, message in wrong:
        for _, call in both_ways(function):
            with pytest.raises(EngineError, match=f"(?s){message}"):
                call()
    same(engine.allreduce([x])[0], np.array([engine.size], np.float32))


def case_what_one_rank_runs_alone_may_not_start_a_collective(engine):
    x = tf.constant([1.0])
    calls = [
        lambda: engine.allreduce([x]),
        lambda: engine.allgather([x]),
        lambda: engine.broadcast([x]),
        engine.barrier,
        lambda: engine.gather_objects(1),
        lambda: engine.broadcast_object(1),
    ]
    traced = tf.function(lambda: engine.allreduce([x])[0], autograph=False)
    same(traced(), np.array([engine.size], np.float32))
    with engine.refusing("A callback runs on rank 0 alone") if engine.rank == 0 else contextlib.nullcontext():
        if engine.rank == 0 and engine.size > 1:
            for call in calls:
                with pytest.raises(EngineError, match="A callback runs on rank 0 alone.*never come"):
                    call()
            with pytest.raises(tf.errors.OpError) as caught:
                traced()
            assert "A callback runs on rank 0 alone" in str(engine.explain(caught.value) or caught.value)
        if engine.size == 1:
            for call in calls:
                call()
    same(engine.allreduce([x])[0], np.array([engine.size], np.float32))
    same(traced(), np.array([engine.size], np.float32))
