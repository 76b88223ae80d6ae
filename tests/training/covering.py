"""The part of the fidelity suite that runs on other versions of Keras and TensorFlow: what depends on them."""

import itertools

import pytest

from tests.helpers import spmd
from tests.training import fidelity

# Each kind of sizes and each kind of input at least once, with as many optimizers.
CELLS = [
    f"{optimizer}-{shape}-{kind}"
    for optimizer, shape, kind in zip(
        fidelity.OPTIMIZERS, itertools.cycle(fidelity.SHAPES), fidelity.KINDS, strict=False
    )
]

# What uses private parts of Keras: each wrapper of ARCHITECTURE.md at least once.
FEATURES = (
    "steps_per_execution",
    "run_eagerly",
    "loss_reductions",
    "regularizers_and_add_loss",
    "gradient_accumulation",
    "loss_scale",
    "metrics_of_whole_batches",
    "on_batch",
    "synchronized_batch_normalization",
    "exact_metrics",
    "masked_losses_of_whole_batches",
    "two_optimizers",
    "predictions_of_a_dataset",
    "adopted",
)

COVERING = (*CELLS, *FEATURES)


def launched_by(python: str):
    """Returns the fixture that runs what pytest has selected of it, on two ranks of an interpreter's environment."""

    @pytest.fixture(scope="module")
    def launched(request):
        return spmd.run("tests.training.all_cases:CASES", 2, only=spmd.selected(request), python=python, timeout=570)

    return launched
