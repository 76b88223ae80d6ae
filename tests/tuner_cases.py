"""KerasTuner in a scope of several ranks: cases for `test_tuner.py`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np

import kdist
from kdist._engine import open_engine
from tests.training.behaviours import assert_equal_everywhere
from tests.training.fidelity import BATCH, both, fresh, rows, size


def build(hp: Any) -> keras.Model:
    keras.config.set_floatx("float64")  # KerasTuner calls clear_session before each trial
    initializer = keras.initializers.GlorotUniform(seed=1)
    model = keras.Sequential([keras.Input((5,))])
    for _ in range(hp.Int("layers", 1, 2)):
        units = hp.Int("units", 2, 6)
        model.add(keras.layers.Dense(units, activation="tanh", kernel_initializer=initializer))
    model.add(keras.layers.Dense(2, kernel_initializer=initializer))
    model.compile(keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-1, sampling="log")), "mse", metrics=["mae"])
    return model


def random_search(directory: str, **more: Any) -> keras_tuner.Tuner:
    return keras_tuner.RandomSearch(build, "val_loss", max_trials=2, directory=directory, project_name="p", **more)


def hyperband(directory: str, **more: Any) -> keras_tuner.Tuner:
    return keras_tuner.Hyperband(
        build, "val_loss", max_epochs=2, factor=2, directory=directory, project_name="p", **more
    )


def searched(tuner: keras_tuner.Tuner, batch: int, **more: Any) -> keras_tuner.Tuner:
    x, y = rows("ragged")
    tuner.search(x, y, validation_data=(x, y), batch_size=batch, shuffle=False, verbose=0, **more)
    return tuner


def trials_of(tuner: keras_tuner.Tuner) -> dict[str, Any]:
    trials = tuner.oracle.trials
    return {name: [trials[name].status, trials[name].score, trials[name].hyperparameters.values] for name in trials}


def shared_directory() -> str:
    return open_engine(kdist.cluster_info()).broadcast_object(tempfile.mkdtemp() if kdist.is_chief() else None)


def as_in_one_process(make: Callable[..., keras_tuner.Tuner]) -> None:
    """The same trials with the same scores, and the same best model, which each rank can read."""
    x, _ = rows("ragged")
    folder = shared_directory()

    def script(batch: int) -> dict[str, Any]:
        early = keras.callbacks.EarlyStopping("val_loss", patience=2)
        tuner = searched(make(f"{folder}/{batch}", seed=1), batch, epochs=3, callbacks=[early])
        (best,) = tuner.get_best_models()
        return {
            "best": best.predict(x, batch_size=batch, verbose=0),
            "weights": best.get_weights(),
            "scores": [trial[1] for trial in trials_of(tuner).values()],
            "trials": json.dumps([trial[2] for trial in trials_of(tuner).values()]),
            "hyperparameters": json.dumps(tuner.get_best_hyperparameters()[0].values),
        }

    both(script)
    if kdist.is_chief():
        written = [{path.relative_to(place) for path in place.rglob("*")} for place in Path(folder).iterdir()]
        assert len(written) == 2
        assert written[0] == written[1]
        for file in Path(folder).rglob("*.json"):
            json.loads(file.read_text())


def case_random_search():
    as_in_one_process(random_search)


def case_hyperband():
    as_in_one_process(hyperband)


def case_without_a_seed_and_made_before_the_scope():
    """Ranks would draw other hyperparameters: the chief's are taken."""
    fresh()
    random.seed(kdist.rank())
    tuner = random_search(shared_directory())  # not `overwrite`: outside of the scope each rank would delete it
    with kdist.scope(scale_lr=None):
        searched(tuner, BATCH)
    found = assert_equal_everywhere(trials_of(tuner))
    assert [status for status, *_ in found.values()] == ["COMPLETED"] * 2


def case_a_search_goes_on():
    """Started again it reads what the chief has written; overwriting it begins anew."""
    folder = shared_directory()
    fresh()
    with kdist.scope(scale_lr=None) as strategy:
        first = searched(random_search(folder, distribution_strategy=strategy), BATCH)
        found = assert_equal_everywhere(trials_of(first))
        again = random_search(folder)
        again.oracle.max_trials = 3
        searched(again, BATCH)
        after = assert_equal_everywhere(trials_of(again))
        assert {name: after[name] for name in found} == found
        assert len(after) == 3
        anew = random_search(folder, overwrite=True)
        assert_equal_everywhere(trials_of(searched(anew, BATCH)))
        kdist.barrier()
        assert len(list(Path(folder).rglob("trial.json"))) == 2


def case_the_chief_alone_writes():
    with tempfile.TemporaryDirectory() as own:
        fresh()
        with kdist.scope(scale_lr=None):
            tuner = searched(random_search(own), BATCH)
            assert_equal_everywhere(trials_of(tuner))
        written = {path.name for path in Path(own).rglob("*") if path.is_file()}
    expected = {"oracle.json", "tuner0.json", "trial.json", "build_config.json", "checkpoint.weights.h5"}
    assert written == (expected if kdist.is_chief() else set()), written


def case_a_trial_that_fails_on_all_ranks():
    fresh()
    made: list[Any] = []

    def sometimes(hp: Any) -> keras.Model:
        made.append(hp)
        if len(made) == 3:  # the tuner itself makes the first
            raise keras_tuner.errors.FailedTrialError("too large")
        return build(hp)

    with kdist.scope(scale_lr=None):
        tuner = keras_tuner.RandomSearch(sometimes, "val_loss", max_trials=2, directory=shared_directory())
        searched(tuner, BATCH)
        statuses = [status for status, *_ in assert_equal_everywhere(trials_of(tuner)).values()]
        assert sorted(statuses) == ["COMPLETED", "FAILED"]
        assert np.isfinite(tuner.get_best_models()[0].predict(np.ones((2 * size(), 5)), verbose=0)).all()
