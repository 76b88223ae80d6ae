"""What every engine must do: cases for any number of ranks, their expectations computed from rank and size.

Bound to an engine by a test module, see `tests/helpers/spmd.py`. Each case is given the engine.
"""

import contextlib
import functools
import hashlib
import itertools
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

from kdist.engines.mesh import Mesh
from kdist.errors import EngineError

HALVES = [tf.float16, tf.bfloat16]
FLOATS = [*HALVES, tf.float32, tf.float64]
INTS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
NUMBERS = [*FLOATS, *INTS, tf.complex64, tf.complex128]
ANYTHING = [*NUMBERS, tf.bool]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (4, 1, 5)]

LARGE = 1_000_003  # elements: several pieces of a large message, and a remainder

SWEEPS = (
    "case_allreduce_sums_every_dtype_and_shape",
    "case_allgather_concatenates_unequal_first_dimensions",
    "case_alltoall_sends_each_row_to_its_rank",
    "case_broadcast_gives_each_roots_values",
    "case_inputs_are_left_alone_and_results_are_the_callers_own",
    "case_reduce_scatter_sums_every_dtype_and_shape",
    "case_results_stay_when_the_same_message_is_sent_again",
    "case_what_a_graph_sends_is_the_same_afterwards",
)
"""What is slow and much the same on other numbers of ranks and with other MPIs: an engine runs it on one job."""


def both_ways(function):
    """Yields `(how, function)`: called eagerly, and in a `tf.function`."""
    yield "eager", function
    yield "graph", tf.function(function, autograph=False)


def half(shapes, dtypes, how):
    """Returns half of the pairs: each goes eagerly or in a graph, each shape and each dtype both ways."""
    numbered = itertools.product(enumerate(shapes), enumerate(dtypes))
    return [(shape, dtype) for (i, shape), (j, dtype) in numbered if (i + j) % 2 == (how == "graph")]


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
    for how, allreduce in both_ways(engine.allreduce):
        kinds = half(SHAPES, NUMBERS, how)
        for dtype in NUMBERS:
            shapes = [shape for shape, of in kinds if of == dtype]
            results = allreduce([values(shape, dtype, engine.rank) for shape in shapes])
            assert len(results) == len(shapes)
            for shape, result in zip(shapes, results, strict=True):
                same(result, summed(shape, dtype, engine.size), (how, dtype.name, shape))


def case_allreduce_warns_of_nothing_that_is_not_finite(engine):
    """A loss scale that is too large is no error."""
    sent = {
        tf.float32: np.full(40_000, 3e38, np.float32),
        tf.float16: np.full(90_000, np.inf if engine.rank % 2 else -np.inf, np.float16),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = engine.allreduce([tf.constant(each) for each in sent.values()])
        halves, _ = engine.reduce_scatter([tf.constant(each) for each in (sent[tf.float16], sent[tf.float32])])
    if engine.size > 1:
        assert np.isinf(sums[0].numpy()).all()
        assert np.isnan(sums[1].numpy()).all()
        assert np.isnan(halves.numpy()).all()


def case_allreduce_where_functions_run_eagerly(engine):
    tf.config.run_functions_eagerly(True)
    try:
        sums = engine.allreduce([values((3,), dtype, engine.rank) for dtype in (tf.float32, tf.float64, tf.int64)])
    finally:
        tf.config.run_functions_eagerly(False)
    for each in sums:
        same(each, summed((3,), each.dtype, engine.size))


def case_allreduce_sums_any_mixture_in_the_lists_order(engine):
    for how, allreduce in both_ways(engine.allreduce):
        kinds = half(SHAPES, NUMBERS, how)
        np.random.default_rng(0).shuffle(kinds)
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
    for how, allgather in both_ways(engine.allgather):
        for tail, dtype in half([(), (3,), (2, 0), (1, 4)], ANYTHING, how):
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


def case_no_collective_is_compiled_by_xla(engine):
    calls = (engine.allreduce, engine.allgather, engine.reduce_scatter, engine.broadcast)
    for collective in calls if engine.size > 1 else ():
        compiled = tf.function(collective, jit_compile=True, autograph=False)
        with pytest.raises(EngineError, match=r"XLA cannot compile.*remove jit_compile=True"):
            compiled([tf.ones([engine.size])])
    (total,) = engine.allreduce([tf.ones([2])])  # and the engine goes on
    assert total[0] == engine.size


def case_allgather_of_known_lengths(engine):
    lengths = [[3] * engine.size, [each % 2 for each in range(engine.size)], [0] * engine.size]
    mine = [tf.fill([counts[engine.rank], 2], float(engine.rank)) for counts in lengths]
    mine.append(tf.constant(randoms(engine.rank)))
    lengths.append([len(mine[-1])] * engine.size)
    for how, allgather in both_ways(lambda tensors: engine.allgather(tensors, lengths)):
        gathered = allgather(mine)
        for place, counts in enumerate(lengths[:-1]):
            expected = np.repeat(np.arange(engine.size, dtype="float32"), counts)
            np.testing.assert_array_equal(gathered[place][:, 0], expected, err_msg=how)
        expected = np.concatenate([randoms(each) for each in range(engine.size)])
        np.testing.assert_array_equal(gathered[-1], expected, err_msg=how)


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

    for how, alltoall in both_ways(engine.alltoall):
        kinds = half(SHAPES, ANYTHING, how)
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


# Rows of sums


def case_reduce_scatter_sums_every_dtype_and_shape(engine):
    for how, reduce_scatter in both_ways(engine.reduce_scatter):
        kinds = half([(0,), (7,), (3, 0, 2), (9, 1, 5)], NUMBERS, how)
        results = reduce_scatter([values(shape, dtype, engine.rank) for shape, dtype in kinds])
        for (shape, dtype), result in zip(kinds, results, strict=True):
            rows = slice(engine.rank * shape[0] // engine.size, (engine.rank + 1) * shape[0] // engine.size)
            same(result, summed(shape, dtype, engine.size)[rows], (how, dtype.name, shape))
        assert list(reduce_scatter([])) == []


def case_reduce_scatter_sums_halves_in_float32(engine):
    for dtype in HALVES:
        everyone = [tf.cast(randoms(rank, shape=(1001,)) * 100, dtype) for rank in range(engine.size)]
        total = sum(tf.cast(one, tf.float32) for one in everyone)
        for how, reduce_scatter in both_ways(engine.reduce_scatter):
            (mine,) = reduce_scatter([everyone[engine.rank]])
            gathered = np.asarray(tf.cast(engine.allgather([mine])[0], tf.float32))
            half_unit = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8}[dtype]
            np.testing.assert_allclose(gathered, total, rtol=half_unit * 1.01, atol=1e-4, err_msg=how)


def case_reduce_scatter_of_large_tensors(engine):
    """The parts together are the sum, the same every time: of a large tensor, of its neighbours, and in any rank."""
    mine = [tf.constant(randoms(engine.rank)), tf.constant(randoms(engine.rank, np.float64, (65537, 2)))]
    every_time = []
    for how, reduce_scatter in both_ways(engine.reduce_scatter):
        gathered = [np.asarray(each) for each in engine.allgather(reduce_scatter(mine))]
        every_time.append(gathered)
        for result, like in zip(gathered, mine, strict=True):
            dtype = result.dtype
            everyone = [randoms(rank, dtype, like.shape).astype(np.float64) for rank in range(engine.size)]
            atol = np.finfo(dtype).eps * 10
            np.testing.assert_allclose(result, sum(everyone), rtol=atol, atol=atol, err_msg=how)
    for eager, graph in zip(*every_time, strict=True):
        same(eager, graph)


# Rows by counts


def _count(sender, receiver):
    return (2 * sender + receiver) % 4  # unequal, and 0 for some


def _rows(shape, dtype, sender, receiver):
    return values((_count(sender, receiver), *shape), dtype, 3 * sender + receiver)


def case_alltoallv_sends_rows_by_counts(engine):
    ranks = range(engine.size)
    counts = [_count(engine.rank, receiver) for receiver in ranks]
    for how, alltoallv in both_ways(engine.alltoallv):
        kinds = half([(), (2, 0), (1, 4)], ANYTHING, how)
        mine = [tf.concat([_rows(*kind, engine.rank, receiver) for receiver in ranks], 0) for kind in kinds]
        results, received = alltoallv(mine, counts if how == "eager" else tf.constant(counts))
        same(received, np.array([_count(sender, engine.rank) for sender in ranks], np.int64), how)
        for kind, result in zip(kinds, results, strict=True):
            same(result, tf.concat([_rows(*kind, sender, engine.rank) for sender in ranks], 0), (how, kind))


def case_alltoallv_takes_counts_that_are_known_when_the_graph_runs(engine):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([engine.size], tf.int32)])
    def exchange(rows, counts):
        (result,), received = engine.alltoallv([rows], counts)
        assert result.shape.as_list() == [None, 2]
        assert received.shape == (engine.size,)
        return result, received

    for times in range(3):  # none at all, at first
        counts = np.full(engine.size, times, np.int32)
        result, received = exchange(np.full((times * engine.size, 2), engine.rank, np.float32), counts)
        same(result, np.repeat(np.arange(engine.size, dtype=np.float32), times)[:, None] * np.ones((1, 2), np.float32))
        same(received, counts.astype(np.int64))
    if engine.size > 1:  # else rows and counts are the caller's own
        with pytest.raises((tf.errors.InvalidArgumentError, EngineError), match="do not add up"):
            exchange(np.zeros((3, 2), np.float32), np.ones(engine.size, np.int32) * 7)


def case_alltoallv_of_large_tensors(engine):
    counts = [LARGE // 2 + receiver for receiver in range(engine.size)]
    for how, alltoallv in both_ways(engine.alltoallv):
        (result,), received = alltoallv([tf.fill([sum(counts)], float(engine.rank))], counts)
        mine = counts[engine.rank]
        same(received, np.full(engine.size, mine, np.int64), how)
        same(result, np.repeat(np.arange(engine.size, dtype=np.float32), mine), how)


# Messages between two ranks


def _has_messages(engine):
    """Returns whether messages can be sent; an engine that cannot must raise, and name one that can."""
    if engine.name == "horovod":
        for call in (lambda: engine.send([tf.zeros(1)], 0), lambda: engine.recv([tf.zeros(1)], 0)):
            with pytest.raises(EngineError, match="Horovod has no messages.*'mpi' or 'collective'"):
                call()
    return engine.name != "horovod" and engine.size > 1


def case_messages_of_every_dtype_and_shape_travel_around(engine):
    if not _has_messages(engine):
        return
    after, before = (engine.rank + 1) % engine.size, (engine.rank - 1) % engine.size

    def exchange(mine):
        engine.send(mine, after)  # all ranks send first
        engine.send([], after)
        return engine.recv([tf.TensorSpec(each.shape, each.dtype) for each in mine], before)

    for how, function in both_ways(exchange):
        kinds = half([(), (7,), (3, 0, 2)], ANYTHING, how)
        for _ in range(2):
            results = function([values(shape, dtype, engine.rank) for shape, dtype in kinds])
            for (shape, dtype), result in zip(kinds, results, strict=True):
                same(result, values(shape, dtype, before), (how, dtype.name, shape))


def case_messages_arrive_in_the_order_of_sending(engine):
    """From the last rank to the first: large ones, small ones, of equal size and not, eagerly and in a graph."""
    if not _has_messages(engine):
        return
    shapes = [(LARGE,), (3,), (3,), (2, 5), (LARGE,), (3,)]

    def send():
        for place, shape in enumerate(shapes):
            engine.send([tf.fill(shape, float(place))], 0)

    def recv():
        return [engine.recv([tf.zeros(shape)], engine.size - 1)[0] for shape in shapes]

    for sends in (send, tf.function(send, autograph=False)):
        for receives in (recv, tf.function(recv, autograph=False)):
            if engine.rank == engine.size - 1:
                sends()
            if engine.rank == 0:
                for place, (shape, result) in enumerate(zip(shapes, receives(), strict=True)):
                    same(result, np.full(shape, place, np.float32), place)
            engine.barrier()  # while others are under way


def case_messages_run_among_collectives(engine):
    """As in a pipeline: between two sums, from each rank to the next one, which sends it on."""
    if not _has_messages(engine):
        return

    @tf.function(autograph=False)
    def step(x):
        (total,) = engine.allreduce([x])
        if engine.rank > 0:
            (total,) = engine.recv([total], engine.rank - 1)
        if engine.rank < engine.size - 1:
            engine.send([total + 1.0], engine.rank + 1)
        return engine.allreduce([total])[0]

    expected = sum(3 * engine.size + rank for rank in range(engine.size))
    for _ in range(3):
        same(step(tf.fill([4], 3.0)), np.full(4, expected, np.float32))


# Groups of ranks


def _parity(engine):
    """Returns the group of the ranks as odd or even as this one, and these ranks; `None` where there are no groups."""
    ranks = list(range(engine.rank % 2, engine.size, 2))
    if engine.name == "horovod":
        with pytest.raises(EngineError, match="Horovod has no groups.*'mpi' or 'collective'"):
            engine.group(ranks)
        return None, ranks
    return engine.group(ranks), ranks


def case_groups_number_their_ranks(engine):
    group, ranks = _parity(engine)
    if group is None:
        return
    assert (ranks[group.rank], group.size) == (engine.rank, len(ranks))
    assert group.world_ranks == tuple(engine.world_ranks[each] for each in ranks)
    assert group.name == engine.name
    assert (group.local_rank, group.local_size) == (group.rank, group.size)  # all on this host
    assert engine.group(range(engine.size)) is engine
    alone = engine.group([engine.rank])
    assert (alone.rank, alone.size, alone.local_size) == (0, 1, 1)
    same(alone.allreduce([tf.constant(5.0)])[0], np.float32(5))


def case_groups_have_all_collectives(engine):
    group, ranks = _parity(engine)
    if group is None:
        return
    mine = group.rank
    for shape, dtype in [((7,), tf.float32), ((3, 2), tf.float16), ((LARGE,), tf.float64), ((5,), tf.int32)]:
        everyone = [values(shape, dtype, rank) for rank in ranks]
        wide = np.sum([np.asarray(tf.cast(each, tf.float64)) for each in everyone], 0)
        total = tf.cast(wide, dtype)
        rows = slice(mine * shape[0] // group.size, (mine + 1) * shape[0] // group.size)
        for how, exchange in both_ways(
            lambda x: (
                *group.allreduce([x]),
                *group.reduce_scatter([x]),
                *group.allgather([x]),
                *group.alltoall([tf.stack([x] * group.size)]),
                *group.alltoallv([x], [0] * (group.size - 1) + [x.shape[0]])[0],
                *group.broadcast([x], group.size - 1),
            )
        ):
            summed_, part, gathered, exchanged, to_last, first = exchange(everyone[mine])
            group.barrier()
            same(summed_, total, how)
            same(part, total[rows], how)
            same(gathered, tf.concat(everyone, 0), how)
            same(exchanged, tf.stack(everyone), how)
            same(to_last, tf.concat(everyone if mine == group.size - 1 else [everyone[0][:0]], 0), how)
            same(first, everyone[-1], how)
    assert group.gather_objects(engine.rank) == ranks
    assert group.broadcast_object(engine.rank) == ranks[0]
    if group.size > 1:
        group.send([tf.constant(mine)], (mine + 1) % group.size)
        same(group.recv([tf.constant(0)], (mine - 1) % group.size)[0], np.array((mine - 1) % group.size, np.int32))


def case_groups_sum_to_the_same_bits_on_all_ranks(engine):
    group, _ = _parity(engine)
    if group is None:
        return
    for _, allreduce in both_ways(group.allreduce):
        results = allreduce([tf.constant(randoms(engine.rank)), tf.constant(randoms(engine.rank, np.float16, (500,)))])
        digests = group.gather_objects([hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in results])
        assert digests == [digests[0]] * group.size


def case_groups_are_independent_of_each_other_and_of_the_world(engine):
    """One group makes more calls than the other; the world's calls lie between, in one graph; groups have groups."""
    group, ranks = _parity(engine)
    if group is None:
        return

    @tf.function(autograph=False)
    def exchange(x):
        for _ in range(1 + 2 * (engine.rank % 2)):
            (first,) = group.allreduce([x])
        (whole,) = engine.allreduce([x])
        (again,) = group.allreduce([first])
        return first, whole, again

    for _ in range(3):
        first, whole, again = exchange(tf.ones([2]))
        same(first, np.full(2, len(ranks), np.float32))
        same(whole, np.full(2, engine.size, np.float32))
        same(again, np.full(2, len(ranks) ** 2, np.float32))
    inner = group.group([0, 1] if group.size > 1 and group.rank < 2 else [group.rank])
    members = [rank for rank in ranks if rank in inner.world_ranks]
    assert inner.gather_objects(engine.rank) == members
    same(engine.allreduce([tf.constant(1.0)])[0], np.float32(engine.size))


def case_groups_are_refused_where_collectives_are(engine):
    group, ranks = _parity(engine)
    if group is None or engine.size == 1:
        return
    x = tf.constant([1.0])
    traced = tf.function(lambda: group.allreduce([x])[0], autograph=False)
    traced()
    for refusing in (engine, group):
        with refusing.refusing("A callback runs on rank 0 only") if engine.rank == 0 else contextlib.nullcontext():
            if engine.rank == 0 and group.size > 1:
                for call in (lambda: group.allreduce([x]), lambda: group.send([x], 1), lambda: group.recv([x], 1)):
                    with pytest.raises(EngineError, match="A callback runs on rank 0 only.*never join"):
                        call()
                with pytest.raises(tf.errors.OpError) as caught:
                    traced()
                assert "A callback runs on rank 0 only" in str(engine.explain(caught.value) or caught.value)
    same(traced(), np.array([len(ranks)], np.float32))


def case_groups_that_are_none_are_refused(engine):
    wrong = [[engine.size, engine.rank], [engine.rank, engine.rank], [], [-1, engine.rank]]
    for ranks in wrong:
        with pytest.raises(EngineError, match=f"are not a group of rank {engine.rank}"):
            engine.group(ranks)
    if engine.size > 1:
        with pytest.raises(EngineError, match="give different groups"):
            engine.group([0] if engine.rank == 0 else range(engine.size))


def case_a_mesh_of_replicas_and_stages(engine):
    one_stage = Mesh(engine)
    assert (one_stage.replica, one_stage.stage, one_stage.replicas) == (engine.rank, 0, engine)
    assert one_stage.stages.size == 1
    with pytest.raises(EngineError, match="do not form a mesh"):
        Mesh(engine, engine.size + 1)
    for num_stages in range(1, engine.size + 1):
        if engine.size % num_stages or (engine.name == "horovod" and 1 < num_stages < engine.size):
            continue
        mesh = Mesh(engine, num_stages)
        assert (mesh.replica, mesh.stage) == mesh.place_of(engine.rank) == divmod(engine.rank, num_stages)
        assert (mesh.replicas.rank, mesh.replicas.size) == (mesh.replica, mesh.num_replicas)
        assert (mesh.stages.rank, mesh.stages.size) == (mesh.stage, num_stages)
        assert mesh.replicas.gather_objects(engine.rank) == list(range(mesh.stage, engine.size, num_stages))
        assert mesh.stages.gather_objects(engine.rank) == list(
            range(engine.rank - mesh.stage, engine.rank + num_stages - mesh.stage)
        )


# Broadcasting


def case_broadcast_gives_each_roots_values(engine):
    for root in range(engine.size):
        for how, broadcast in both_ways(lambda *tensors, root=root: engine.broadcast(tensors, root)):
            kinds = half(SHAPES, ANYTHING, how)
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
                    *engine.reduce_scatter([x]),
                    *engine.alltoallv([x], [0] * (engine.size - 1) + [x.shape[0]])[0],
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
        assert engine.reduce_scatter([tf.zeros((engine.size, 3))])[0].shape == (1, 3)
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


def case_numbers_are_summed(engine):
    expected = [sum(range(engine.size)), 0.5 * engine.size, 0.0]
    assert engine.sum_numbers([float(engine.rank), 0.5, 0.0]) == expected
    with engine.refusing("This runs on one rank"):
        if engine.size > 1:
            with pytest.raises(EngineError, match="on one rank"):
                engine.sum_numbers([1.0])


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
        (lambda: engine.allgather([x], [[len(x) + 1] * engine.size]), "other rows than their lengths"),
        (lambda: engine.allgather([x], []), "other rows than their lengths"),
        (lambda: engine.alltoall([tf.zeros((engine.size + 1, 2))]), f"no row for each rank.*{engine.size + 1}, 2"),
        (lambda: engine.alltoall([tf.constant(1.0)]), "no row for each rank"),
        (lambda: engine.alltoall([tf.constant(["text"] * engine.size)]), "sent.*string"),
        (lambda: engine.reduce_scatter([tf.constant(1.0)]), "scalar"),
        (lambda: engine.reduce_scatter([tf.constant([True])]), "summed.*bool"),
        (lambda: engine.alltoallv([x], [1] * (engine.size + 1)), "no count for each rank"),
        (lambda: engine.alltoallv([x], [-1] * engine.size), "no count for each rank"),
        (lambda: engine.alltoallv([x], [1.0] * engine.size), "no count for each rank"),
        (lambda: engine.alltoallv([x], [2] * engine.size), "another number of rows"),
        (lambda: engine.alltoallv([tf.constant(1.0)], [1] * engine.size), "scalar"),
        (lambda: engine.broadcast([sparse]), "IndexedSlices"),
        (lambda: engine.broadcast([tf.constant("text")]), "sent.*string"),
        (lambda: engine.broadcast([x], engine.size), f"root={engine.size}.*from 0 to {engine.size - 1}"),
        (lambda: engine.broadcast([x], -1), "root=-1"),
        (lambda: engine.broadcast([x], None), "root=None"),
        (lambda: engine.broadcast_object(1, engine.size), f"root={engine.size}"),
        (lambda: engine.gather_objects(object()), "JSON.*object"),
    ]
    if engine.name != "horovod":
        other = (engine.rank + 1) % engine.size
        wrong += [
            (lambda: engine.send([x], engine.rank), f"`to` names no other rank.*to={engine.rank}"),
            (lambda: engine.recv([x], engine.size), f"`source` names no other rank.*source={engine.size}"),
            (lambda: engine.recv([x], None), "source=None"),
        ]
        if engine.size > 1:
            wrong += [
                (lambda: engine.send([tf.constant("text")], other), "sent.*string"),
                (lambda: engine.recv([tf.TensorSpec([None])], other), "shape that is not known"),
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
                with pytest.raises(EngineError, match="A callback runs on rank 0 alone.*never join"):
                    call()
            with pytest.raises(tf.errors.OpError) as caught:
                traced()
            assert "A callback runs on rank 0 alone" in str(engine.explain(caught.value) or caught.value)
        if engine.size == 1:
            for call in calls:
                call()
    same(engine.allreduce([x])[0], np.array([engine.size], np.float32))
    same(traced(), np.array([engine.size], np.float32))


GROUPS = [name for name in globals() if name.startswith(("case_groups_", "case_a_mesh_", "case_messages_"))]
"""The cases that show more on 4 ranks, where each of two groups has two."""
