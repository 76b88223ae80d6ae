"""What is Horovod's own: cases for any number of ranks, and scripts that end in their own way."""

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

from kdist.engines.horovod import HorovodEngine
from kdist.errors import EngineError
from tests.engines.mpi_cases import processor_seconds


def engine():
    return HorovodEngine()


def engine_over_the_network():
    return HorovodEngine(share_memory=False)


def case_the_engine_is_horovods_world(engine):
    import horovod.tensorflow as hvd

    assert (engine.name, engine.rank, engine.size) == ("horovod", hvd.rank(), hvd.size())
    assert (engine.local_rank, engine.local_size) == (engine.rank, engine.size)  # all on this host


def case_whether_ranks_share_memory(engine):
    return engine._shared is not None


def case_shapes_that_differ_are_an_error(engine):
    tensors = [tf.ones([engine.rank + 1])]
    reason = " from Horovod.*hape" if engine._shared is None else ".*bytes of float32 to sum on rank"
    with pytest.raises(EngineError, match=f"(?s)A collective failed on rank.*Received{reason}.*Fix"):
        engine.allreduce(tensors)
    if engine._shared is not None:
        with pytest.raises(tf.errors.OpError) as raised:
            tf.function(engine.allreduce, autograph=False)(tensors)
        assert "bytes of float32 to sum on rank" in str(engine.explain(raised.value))
    assert float(engine.allreduce([tf.constant(1.0)])[0]) == engine.size


def case_a_graph_that_was_traced_before_is_refused_too(engine):
    @tf.function(autograph=False)
    def total(x):
        return engine.allreduce([x])[0]

    x = tf.constant([1.0])
    assert float(total(x)[0]) == engine.size
    if engine.rank == 0:
        with engine.refusing("A callback runs on rank 0 alone"):
            with pytest.raises(tf.errors.InvalidArgumentError) as raised:
                total(x)
            assert "A callback runs on rank 0 alone" in str(engine.explain(raised.value))
    assert float(total(x)[0]) == engine.size


def case_collectives_of_constants_are_not_computed_once_and_for_all(engine):
    @tf.function(autograph=False)
    def wait():
        return engine.allreduce([tf.constant(1.0)])[0]

    for last in range(engine.size):  # traced, and twice more
        if engine.rank == last:
            time.sleep(0.3)
        arrived = time.time()
        assert float(wait()) == engine.size
        assert time.time() >= max(engine.gather_objects(arrived))


def case_gradients_do_not_pass(engine):
    # As with any other engine: what a reduction's gradient is, the strategy knows.
    x = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = tf.function(lambda: engine.allreduce([x * 2.0])[0], autograph=False)()
    assert tape.gradient(y, x) is None


# Run by themselves, each in a launch of its own.


def says_whether_open_mpi_yields() -> bool:
    """Returns what Open MPI goes by: on rank 0 the user has set nothing, on the other one that it shall not yield."""
    setting = "OMPI_MCA_mpi_yield_when_idle"
    os.environ.pop(setting)  # the tests' own
    if os.environ["OMPI_COMM_WORLD_RANK"] != "0":
        os.environ[setting] = "0"
    before = dict(os.environ)
    HorovodEngine()
    assert dict(os.environ) == before
    return bool(control_variable(b"mpi_yield_when_idle"))


def control_variable(name: bytes) -> int:
    """Returns one of MPI's own settings, by its interface for tools."""
    (path,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi.so" in line}
    mpi, handle = ctypes.CDLL(path), ctypes.c_void_p()
    index, count, value = (ctypes.c_int() for _ in range(3))
    for done in (
        mpi.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())),
        mpi.MPI_T_cvar_get_index(name, ctypes.byref(index)),
        mpi.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)),
        mpi.MPI_T_cvar_read(handle, ctypes.byref(value)),
    ):
        assert done == 0
    return value.value


def ends_early_and_waits():
    """Rank 0 is done at once, the others go on: they still reach each other, and say what rank 0 burns meanwhile."""
    engine = HorovodEngine()
    pid = engine.broadcast_object(os.getpid())
    if engine.rank == 0:
        return None
    time.sleep(1)  # rank 0 gets to its exit
    start = processor_seconds(pid)
    time.sleep(2)
    return processor_seconds(pid) - start


def initialises_mpi_first():
    """mpi4py is there first: Horovod takes its MPI, and leaves it to mpi4py to finalise."""
    from mpi4py import MPI

    engine = HorovodEngine()
    _both_talk(engine, MPI)


def initialises_mpi_second():
    """Horovod is there first, and finalises MPI while mpi4py still holds communicators."""
    engine = HorovodEngine()
    from mpi4py import MPI

    _both_talk(engine, MPI)


def _both_talk(engine, mpi):
    theirs = mpi.COMM_WORLD.Dup()
    assert float(engine.allreduce([tf.constant(1.0)])[0]) == engine.size
    assert theirs.allreduce(1) == engine.size
    assert float(engine.allreduce([tf.constant(2.0)])[0]) == 2 * engine.size
    sys.kept = theirs  # until the interpreter ends


def keeps_the_others_waiting_and_aborts():
    engine = HorovodEngine()
    is_last = engine.rank == engine.size - 1
    if is_last:
        time.sleep(4)
    engine.barrier()
    if is_last:
        time.sleep(1)  # rank 0 writes its timeline
        print("last words", end="")
        engine.abort(5)
    engine.barrier()
