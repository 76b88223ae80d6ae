"""N ranks against one process: every feature on 2 ranks, a part on 3, and a pairwise-covering part of the matrix.

Everything on every number of ranks, as a table: `python -m tests.training.full`.
"""

import pytest

from tests.helpers import spmd
from tests.helpers.pairwise import pairwise
from tests.training.fidelity import KINDS, OPTIMIZERS, SHAPES

FEATURES = "tests.training.features:FEATURES"
MATRIX = "tests.training.fidelity:MATRIX"

# Where a third rank makes a difference: what two can share out evenly by luck, and denominators of their own.
ON_THREE = (
    "sample_weight",
    "steps_per_epoch_continues",
    "split_batches",
    "masked_sequences",
    "loss_reductions",
    "gradient_accumulation",
    "synchronized_batch_normalization",
    "batch_normalization_is_merged",
    "exact_metrics",
    "two_optimizers",
    "on_batch",
    "predictions_of_a_dataset",
)

CELLS = [
    *((FEATURES, 2, name) for name in spmd.names(FEATURES)),
    *((FEATURES, 3, name) for name in ON_THREE),
    *(
        (MATRIX, ranks, f"{optimizer}-{shape}-{kind}")
        for optimizer, shape, kind, ranks in pairwise(tuple(OPTIMIZERS), SHAPES, KINDS, (2, 3, 4))
    ),
]


@pytest.fixture(scope="module")
def launches(request):
    """Launches each target once on each number of ranks, with the cases that are asked for."""
    done = {}

    def launched(target, ranks):
        if (target, ranks) not in done:
            asked = [item.callspec.params for item in request.session.items if item.module is request.module]
            only = [each["case"] for each in asked if (each["target"], each["ranks"]) == (target, ranks)]
            done[target, ranks] = spmd.run(target, ranks, only=only, timeout=570)
        return done[target, ranks]

    return launched


@pytest.mark.parametrize(("target", "ranks", "case"), CELLS)
def test_case(launches, target, ranks, case):
    launches(target, ranks).check(case)
