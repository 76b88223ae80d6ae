"""The faults of `kdist.testing.Fault` that do not end a job; `test_failures.py` has the others."""

import time

import keras
import numpy as np
import pytest

import kdist
from kdist.callbacks import NaNPolicy
from kdist.errors import NotFiniteError, StrategyError
from kdist.testing import Fault

STEPS = 4


class WithoutLoss(keras.Sequential):
    def train_step(self, data):
        return {"nothing": 0.0}


def trained(*callbacks, make=keras.Sequential):
    """Returns the weights after a `fit` of 4 steps of two batches each."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(2 * STEPS * kdist.size(), 3)).astype("float32")
    with kdist.scope(scale_lr=None):
        model = make([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, x.sum(1), batch_size=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return [np.asarray(variable) for variable in model.weights]


def differ(one, other):
    return not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def last_rank():
    return kdist.size() - 1


def case_a_corrupted_gradient_changes_the_weights_of_all_ranks_alike():
    right = trained()
    assert not differ(right, trained(Fault("corrupt", rank=last_rank(), step=1, factor=1.0)))
    assert not differ(right, trained(Fault("corrupt", rank=last_rank(), step=STEPS, factor=3.0)))
    wrong = trained(Fault("corrupt", rank=last_rank(), step=STEPS - 1, factor=3.0))
    assert differ(right, wrong)
    return [value.tolist() for value in wrong]


def case_a_gradient_of_nan_is_named():
    with pytest.raises(NotFiniteError, match=rf"(?s)rank {last_rank()}.*a gradient of"):
        trained(NaNPolicy(), Fault("corrupt", rank=last_rank(), step=2))


def case_a_slow_rank_is_waited_for():
    started = time.monotonic()
    trained(Fault("slow", rank=last_rank(), step=1, seconds=0.3))
    assert time.monotonic() - started > 0.3 * (STEPS - 1)


def case_faults_that_cannot_be_are_refused():
    for options in ({"kind": "explode"}, {"kind": "raise", "step": -1}, {"kind": "raise", "rank": 9}):
        with pytest.raises(StrategyError, match="Received: .*Expected .*Fix: "):
            trained(Fault(**options))
    with pytest.raises(StrategyError, match="does not call `self.compute_loss`"):
        trained(Fault("corrupt"), make=WithoutLoss)
