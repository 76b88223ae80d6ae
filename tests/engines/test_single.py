"""The null engine does what every engine does, alone."""

import sys

import pytest
import tensorflow as tf

from kdist.engines.single import SingleEngine
from tests.engines import conformance
from tests.helpers import spmd


@pytest.mark.parametrize("case", spmd.names(conformance.__name__))
def test_conformance(case):
    getattr(conformance, case)(SingleEngine())


def test_it_is_alone():
    engine = SingleEngine()
    assert (engine.name, engine.rank, engine.size, engine.local_rank, engine.local_size) == ("single", 0, 1, 0, 1)


def test_nothing_is_added_to_a_graph():
    engine = SingleEngine()

    @tf.function(autograph=False)
    def step(x):
        engine.barrier()
        return engine.broadcast(engine.allreduce([x]))[0]

    operations = step.get_concrete_function(tf.TensorSpec((2,))).graph.get_operations()
    assert {operation.type for operation in operations} == {"Placeholder", "Identity"}


def test_abort_ends_the_process_with_the_code_and_what_was_said():
    script = "from kdist.engines.single import SingleEngine; print('last words', end=''); SingleEngine().abort(7)"
    ended = spmd.execute([sys.executable, "-c", script], timeout=120)
    assert ended.returncode == 7
    assert ended.output.endswith("last words")
