"""What is the collective engine's own: cases for any number of TF_CONFIG workers, and scripts that end in their way."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays.shared_memory import PIECE_BYTES
from kdist.engines.collective import LANES, CollectiveEngine


def addresses() -> list[str]:
    return json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]


def rank() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def engine(**options: Any) -> CollectiveEngine:
    return CollectiveEngine(addresses(), rank(), start_timeout=60, **options)


def engine_over_the_network() -> CollectiveEngine:
    return engine(share_memory=False)


def opened() -> Any:
    """This process's own engine, opened before TensorFlow makes anything, as a scope at the top of a script would."""
    from kdist._engine import open_engine
    from kdist._process import cluster_info

    return open_engine(cluster_info(), "collective")


def case_the_engine_is_the_cluster(engine: CollectiveEngine) -> None:
    assert (engine.name, engine.rank, engine.size) == ("collective", rank(), len(addresses()))
    assert (engine.local_rank, engine.local_size) == (engine.rank, engine.size)


def case_ranks_of_one_host_share_memory(engine: CollectiveEngine) -> None:
    assert (engine._shared is None) == (engine.size == 1)


def case_sizes_around_a_piece_of_shared_memory(engine: CollectiveEngine) -> None:
    for size in (3, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1):
        for wrap in (lambda f: f, tf.function(autograph=False)):
            totals = wrap(lambda x: engine.allreduce([x, tf.cast(x, tf.int64)]))(tf.range(float(size)))
            for total in totals:
                np.testing.assert_array_equal(total, np.arange(size) * engine.size)


def case_more_pieces_than_lanes_and_a_remainder(engine: CollectiveEngine) -> None:
    length = (2 * LANES + 1) * (1 << 19) + 12345  # float32 pieces of 2 MiB
    mine = np.arange(length, dtype=np.float32) % 1013 * (engine.rank + 1)
    expected = np.arange(length, dtype=np.float32) % 1013 * sum(range(1, engine.size + 1))
    for wrap in (lambda f: f, tf.function(autograph=False)):
        for _ in range(2):
            large, small = wrap(lambda x: engine.allreduce([x, x[:3]]))(tf.constant(mine))
            np.testing.assert_array_equal(large, expected)
            np.testing.assert_array_equal(small, expected[:3])


def case_equal_signatures_within_a_graph_keep_their_order(engine: CollectiveEngine) -> None:
    @tf.function(autograph=False)
    def exchange(x: tf.Tensor) -> list[tf.Tensor]:
        return [engine.allreduce([x * float(factor)])[0] for factor in range(20)]

    for factor, total in enumerate(exchange(tf.ones([5]))):
        np.testing.assert_array_equal(total, np.full(5, factor * engine.size, np.float32))


def case_threads_take_turns(engine: CollectiveEngine) -> None:
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(float(engine.allreduce([tf.constant(1.0)])[0])))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [float(engine.size)] * 6


def case_integers_wrap_around(engine: CollectiveEngine) -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.uint64, np.int64):
        most = np.iinfo(dtype).max
        (total,) = engine.allreduce([tf.constant([most], dtype)])
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(total, np.array([most], dtype) * np.array(engine.size, dtype))


# Run by themselves.


def ends_early() -> None:
    """Rank 0 is done at once; what the others still do together needs its server."""
    talking = engine()
    talking.barrier()
    if talking.rank > 0:
        time.sleep(1)


def stays_alone() -> None:
    engine = CollectiveEngine(addresses(), rank(), start_timeout=2)
    engine.barrier()


def made_something_before() -> None:
    """Tensors do no harm, variables and iterators do."""
    from kdist.engines import cluster_start

    tensor = tf.ones(1)
    cluster_start._check_nothing_is_lost(0, 1)
    print("tensors are kept", float(tensor[0]))
    variable, iterator = tf.Variable(1.0), iter(tf.data.Dataset.range(3))
    engine()
    del variable, iterator


def reads_datasets_that_are_older_than_the_cluster() -> None:
    """They are bound to the host's old name, as the Python functions in them are."""
    import keras

    import kdist

    def by_python(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda value: value, [number], tf.float32), (1,))

    rows = np.arange(8, dtype="float32").reshape(8, 1)
    made = tf.data.Dataset.from_tensor_slices(rows)
    generated = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=tf.TensorSpec((1,), tf.float32))
    older = [made, made.map(by_python), generated, made.map(by_python).shuffle(8, seed=1).cache()]
    batches = [dataset.batch(2) for dataset in older]
    with kdist.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
        for dataset, batched in zip(older, batches, strict=True):
            for each in (dataset, dataset.map(lambda row: row), batched.unbatch()):
                assert sorted(float(row[0]) for row in each) == rows.ravel().tolist(), dataset
            assert float(dataset.reduce(np.float32(0), lambda total, row: total + row[0])) == rows.sum()
            assert sorted(model.predict(batched, verbose=0).ravel()) == rows.ravel().tolist(), dataset
    print("all were read", flush=True)


def goes_on_until_a_peer_is_gone(action: str, length: int) -> None:
    """Rank 1 is killed or stands still in the middle; the others do not wait for ever."""
    import signal

    from kdist.reports import failure

    talking = engine(timeout=None if action == "dies" else 10)  # tracing takes seconds on a busy machine

    def explained(error: BaseException) -> BaseException | None:
        found = talking.explain(error)
        print(f"follows from another rank's end: {getattr(found, 'is_consequence', None)}", flush=True)
        return found

    failure.install(talking.abort, talking.rank, talking.size, explained)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        return talking.allreduce([x])[0]

    step(tf.ones([length]))
    print("went on", flush=True)
    if talking.rank == 1:
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[action])
    for _ in range(10**6):
        step(tf.ones([length]))


def waits_in_a_group(of: str, length: int) -> None:
    """Rank 2 dies while rank 0 waits for it; rank 1, in a group of its own, notices nothing and sleeps."""
    from kdist.reports import failure

    everyone = engine()
    failure.install(everyone.abort, everyone.rank, everyone.size, everyone.explain)
    group = everyone.group([1] if everyone.rank == 1 else [0, 2])
    x = tf.ones([length])
    group.allreduce([x])
    if everyone.rank == 2:
        os._exit(9)
    if everyone.rank == 1:
        time.sleep(60)
    group.allreduce([x]) if of == "group" else group.recv([x], 1)


def over_addresses_of_mpi() -> None:
    """Under mpirun the ranks tell each other their addresses over MPI."""
    from kdist._engine import open_engine
    from kdist._process import cluster_info

    talking = open_engine(cluster_info(), "collective")
    assert talking.name == "collective"
    assert len({address.rpartition(":")[2] for address in talking.addresses}) == talking.size
    assert talking.gather_objects(talking.rank) == list(range(talking.size))
    if talking.rank == 1:
        talking.abort(5)
    talking.barrier()
