"""What is MPI's own: cases for any number of ranks under mpirun, and scripts that end in their own way."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from kdist.engines.mpi import MPIEngine
from kdist.engines.tensors.noted_call import NotedCall
from kdist.errors import EngineError


def engine():
    return MPIEngine()


def case_the_engine_is_the_world(engine):
    from mpi4py import MPI

    assert (engine.name, engine.rank, engine.size) == ("mpi", MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert (engine.local_rank, engine.local_size) == (engine.rank, engine.size)  # mpirun starts all on this host


def case_the_users_own_messages_do_not_mix_with_the_engines(engine):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    theirs = np.zeros(1)
    request = world.Iallreduce(np.ones(1), theirs)
    (ours,) = engine.allreduce([tf.constant([10.0])])
    request.Wait()
    assert float(ours[0]) == 10.0 * engine.size
    assert theirs[0] == engine.size


def case_a_communicator_of_some_ranks(engine):
    from mpi4py import MPI

    half = MPIEngine(MPI.COMM_WORLD.Split(engine.rank % 2))
    members = range(engine.rank % 2, engine.size, 2)
    assert (half.rank, half.size) == (engine.rank // 2, len(members))
    assert half.gather_objects(engine.rank) == list(members)


def case_what_is_too_long_for_one_message_is_gathered_in_pieces(engine):
    engine._transport.message_limit = 100
    try:
        mine = [tf.fill([10 * rank_, 3], float(engine.rank)) for rank_ in (engine.rank, 1)]
        unequal, equal = engine.allgather(mine)
    finally:
        del engine._transport.message_limit
    ranks = range(engine.size)
    np.testing.assert_array_equal(unequal, np.concatenate([np.full((10 * rank, 3), rank) for rank in ranks]))
    np.testing.assert_array_equal(equal, np.concatenate([np.full((10, 3), rank) for rank in ranks]))


def case_an_error_from_mpi_says_what_to_look_for(engine):
    call = NotedCall.of("broadcast")
    with pytest.raises(EngineError, match="(?s)Received from MPI.*same order.*Fix"):
        # MPI refuses this by itself.
        engine._exchange(call, lambda _: engine._transport._comm.Bcast(np.zeros(1), root=engine.size))


def case_time_in_collectives_is_counted(engine):
    """Waiting included; in a graph too, where a refusal holds when the graph runs."""
    total = tf.function(lambda x: engine.allreduce([x])[0], autograph=False)
    for exchange in (total, lambda x: engine.allreduce([x])[0]):
        exchange(tf.constant(1.0))
        before = engine.seconds
        if engine.rank == 0:
            time.sleep(0.3)
        exchange(tf.constant(1.0))
        spent = engine.seconds - before
        assert spent < 0.2 if engine.rank == 0 else spent > 0.2, spent
    if engine.rank == 0 and engine.size > 1:
        with engine.refusing("This runs alone"), pytest.raises(Exception, match="This runs alone"):
            total(tf.constant(1.0))


def case_threads_take_turns_in_mpi(engine):
    import threading

    inside, most = [], []

    def exchange(_):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return []

    threads = [threading.Thread(target=engine._exchange, args=(NotedCall.of("barrier"), exchange)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def case_tensorflows_threads_stay_pythons(engine):
    """What Python keeps for a thread of TensorFlow's is there at the next exchange: it is not made anew."""
    import threading

    of_thread, seen, kept = threading.local(), set(), []

    def exchange(arrays):
        if threading.get_ident() in seen:
            kept.append(hasattr(of_thread, "was_here"))
        seen.add(threading.get_ident())
        of_thread.was_here = True
        return list(arrays)

    run = tf.function(lambda: engine._when_run(NotedCall.of("barrier"), exchange, [tf.constant(0)]), autograph=False)
    for _ in range(20):
        run()
    assert kept
    assert all(kept)


# Run by themselves, each in a launch of its own.


def ends_early_and_waits_nearly_idle():
    """Rank 0 is done at once, the others work on: they say how much processor time rank 0 burns in between."""
    engine = MPIEngine()
    pid = engine.broadcast_object(os.getpid())
    if engine.rank == 0:
        return None
    time.sleep(1)  # rank 0 gets to its exit
    start = processor_seconds(pid)
    time.sleep(2)
    return processor_seconds(pid) - start


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def aborts():
    """Nothing but its word can end the job: the other rank is stopped, and a child keeps this one's connections.

    The launcher's process finds the word and what was said before it at once: it is stopped while they are written.
    """
    engine = MPIEngine()
    if engine.rank == engine.size - 1:
        launcher = os.getppid()
        os.kill(launcher, signal.SIGSTOP)
        print("last words", end="")
        resume = f"sleep 0.3; kill -CONT {launcher}; sleep 60"
        subprocess.Popen(["sh", "-c", resume], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        engine.abort(5)
    os.kill(os.getpid(), signal.SIGSTOP)


def refuses_an_mpi_without_threads():
    import mpi4py

    mpi4py.rc.thread_level = "single"
    with pytest.raises(EngineError, match=r"(?s)Received: MPI initialised with thread level 0.*Fix: .*thread_level"):
        MPIEngine()
