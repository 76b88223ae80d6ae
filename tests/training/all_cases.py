"""The features, the matrix and what is random as one target, so that one launch runs all."""

from tests.training.features import FEATURES
from tests.training.fidelity import MATRIX
from tests.training.random_losses import RANDOM_LOSSES
from tests.training.random_programs import RANDOM
from tests.training.random_steps import RANDOM_STEPS

CASES = {**FEATURES, **MATRIX, **RANDOM, **RANDOM_LOSSES, **RANDOM_STEPS}
