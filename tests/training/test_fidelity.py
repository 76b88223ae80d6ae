"""N ranks against one process: most features on 2 ranks, the others on 3, and a pairwise-covering part of the matrix.

Everything on every number of ranks, as a table: `python -m tests.training.full`.
"""

import itertools

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job as make_job
from tests.helpers.pairwise import pairwise
from tests.training.fidelity import KINDS, OPTIMIZERS, SHAPES

FEATURES = "tests.training.features:FEATURES"

# Where a third rank makes a difference: what two can share out evenly by luck, and denominators of their own. On two
# ranks they run by the full command. More of them run on three ranks of other engines.
ON_THREE = (
    "sample_weight",
    "steps_per_epoch_continues",
    "split_batches",
    "loss_reductions",
    "gradient_accumulation",
    "predictions_of_a_dataset",
    "losses_of_whole_batches",
    "weighted_losses_of_whole_batches",
    "metrics_of_whole_batches",
    "training_steps_of_the_guide",
    "a_loop_on_rows_of_each_rank",
    "counters_where_ranks_have_shapes_of_their_own",
    "counters_of_steps_of_static_shape",
)

# What engines do differently: kinds of tensors, order and number of messages, who ends when. Horovod over MPI is the
# same engine as over Gloo, and its busy waits are slow where ranks share cores: it has its part of the matrix.
ON_EVERY_ENGINE = (
    "jit_compile",
    "gradient_accumulation",
    "masked_sequences",
    "sequences_of_unknown_length",
    "mixed_precision_scales_as_one",
    "synchronized_batch_normalization",
    "exact_metrics",
    "two_optimizers",
    "predictions_that_are_no_plain_arrays",
    "gradients_of_16_bits",
    "losses_of_several_outputs",
    "a_loop_on_the_same_rows",
    "counters_need_no_aggregation",
)

JOBS = (("mpi", 2), ("mpi", 3), ("horovod over gloo", 2), ("horovod over mpi", 3), ("collective", 3))

# Slow ones of which another feature is a sibling: by the full command.
LIKE_OTHERS = (
    "split_batches_of_other_sizes",
    "losses_that_leave_out_a_class",
    "jit_compile_of_a_recurrent_model",
    "compressed_gradients_beside_other_features",
)

# Four ranks share two cores: no more than each kind of input once, and each shape.
ON_FOUR = [
    f"{optimizer}-{shape}-{kind}"
    for optimizer, shape, kind in zip(OPTIMIZERS, itertools.cycle(SHAPES), KINDS, strict=False)
]

CELLS = [
    *((("mpi", 2), name) for name in spmd.names(FEATURES) if name not in LIKE_OTHERS + ON_THREE),
    *((("mpi", 3), name) for name in ON_THREE),
    (("mpi", 3), "random_programs_0"),
    *((job, name) for job in (("horovod over gloo", 2), ("collective", 3)) for name in ON_EVERY_ENGINE),
    *((("mpi", 4), name) for name in ON_FOUR),
    # No engine knows of optimizers: they take turns.
    *(
        (job, f"{optimizer}-{shape}-{kind}")
        for (job, shape, kind), optimizer in zip(
            pairwise(JOBS, SHAPES, KINDS), itertools.cycle(OPTIMIZERS), strict=False
        )
    ),
]


@pytest.fixture(scope="module")
def launches(request):
    """Launches each job with the cases that are asked for, a batch at a time."""
    done = {}

    def launched(job, case):
        asked = [item.callspec.params for item in request.session.items if item.module is request.module]
        only = spmd.batch_with(case, [each["case"] for each in asked if each["job"] == job])
        if (job, only[0]) not in done:
            done[job, only[0]] = make_job(*job).run("tests.training.all_cases:CASES", only=only, timeout=570)
        return done[job, only[0]]

    return launched


@pytest.mark.parametrize(
    ("job", "case"), CELLS, ids=[f"{engine} on {ranks}: {name}" for (engine, ranks), name in CELLS]
)
def test_case(launches, job, case):
    launches(job, case).check(case)
