"""What callbacks remember survives a file, whatever the model's dtype."""

import io

import keras
import numpy as np
import pytest

from kdist.callbacks import ChiefOnly
from kdist.checkpoint.callback_state import CallbackState


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_best_weights_survive_a_file(dtype):
    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=keras.DTypePolicy(dtype))])

    model, best = make(), keras.callbacks.EarlyStopping(restore_best_weights=True)
    best.best_weights = model.get_weights()
    state = CallbackState([best]).state_dict()
    values = state.pop("values")
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    found = keras.callbacks.EarlyStopping(restore_best_weights=True)
    CallbackState([found]).load_state_dict({"values": values, **np.load(file)})
    other = make()
    other.set_weights(found.best_weights)
    for one, two in zip(other.get_weights(), best.best_weights, strict=True):
        assert str(one.dtype) == dtype
        np.testing.assert_array_equal(one, two)


def test_a_callback_that_the_chief_alone_runs_remembers():
    best, other, found = (keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True) for _ in range(3))
    best.best, other.best = 0.5, 0.25
    state = CallbackState([ChiefOnly(best), other]).state_dict()
    CallbackState([ChiefOnly(found)]).load_state_dict(state)
    assert found.best == 0.5
