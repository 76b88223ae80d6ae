"""The features and the matrix as one target, so that one launch runs both."""

from tests.training.features import FEATURES
from tests.training.fidelity import MATRIX

CASES = {**FEATURES, **MATRIX}
