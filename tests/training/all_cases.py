"""The features, the matrix and the random programs as one target, so that one launch runs all."""

from tests.training.features import FEATURES
from tests.training.fidelity import MATRIX
from tests.training.random_programs import RANDOM

CASES = {**FEATURES, **MATRIX, **RANDOM}
