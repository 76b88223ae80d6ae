"""Saving and loading: on the chief alone or on all ranks, in a scope or after it; scopes one after the other."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kdist
from kdist.data.source import Source
from tests.training.behaviours import assert_equal_everywhere, weights_of
from tests.training.fidelity import BATCH, compare, fed, fresh, mlp, of_the_chief, outcome, rows, size

FOLDER = "SAVED_MODELS_FOLDER"
RATE = 0.05


def folder() -> Path:
    """Returns the directory that the test shares with the ranks."""
    return Path(os.environ[FOLDER])


def optimizers() -> dict[str, keras.optimizers.Optimizer]:
    return {
        "sgd": keras.optimizers.SGD(RATE, momentum=0.9),
        "adam": keras.optimizers.Adam(RATE),
        "schedule": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(RATE, 100, 0.9)),
        "mixed": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(RATE)),
    }


def saved_on_the_chief_and_on_all() -> None:
    """Files of every kind, written while the learning rate is scaled: in the warm-up, and after it."""
    x, y = rows("ragged")
    for name, optimizer in optimizers().items():
        keras.config.set_floatx("float32")
        with kdist.scope(scale_lr=2.0, warmup_epochs=2):
            model = mlp()
            model.compile(optimizer, "mse", metrics=["mae"])
            model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
            if kdist.is_chief():
                model.save(folder() / f"{name}-warming.keras")
            model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
            if kdist.is_chief():
                model.save(folder() / f"{name}-chief.keras")
                model.save_weights(folder() / f"{name}-chief.weights.h5")
                if name == "adam":
                    model.export(folder() / f"{name}-exported", verbose=False)
            model.save(folder() / f"{name}-rank{kdist.rank()}.keras")
            model.save_weights(folder() / f"{name}-rank{kdist.rank()}.weights.h5")
            if (
                kdist.is_chief() and name == "adam"
            ):  # the last: Keras forgets the optimizer's settings when it writes this
                model.save(folder() / f"{name}-chief.h5")
        loss = assert_equal_everywhere(model.evaluate(x, y, batch_size=BATCH, verbose=0))
        assert_equal_everywhere(weights_of(model))
        if kdist.is_chief():
            np.savez(
                folder() / f"{name}.npz",
                *[np.asarray(v) for v in model.weights],
                x=x,
                y=y,
                loss=loss[0],
                predicted=model.get_layer(index=-1)(model.layers[0](x)),
            )
    kdist.barrier()


def loaded_in_a_scope_goes_on_distributed() -> None:
    """Train, save on the chief, load on all, train on: as one process that never stopped. Weights alone too."""
    fresh()
    x, y = rows("ragged")
    path = folder() / "to_go_on.keras"

    def compiled() -> keras.Model:
        model = mlp()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    plain = compiled()
    plain.fit(x, y, batch_size=size() * BATCH, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=size() * BATCH, shuffle=False, verbose=0)
    with kdist.scope(scale_lr=None):
        model = compiled()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        if kdist.is_chief():
            model.save(path)
        kdist.barrier()
        loaded = keras.models.load_model(path)
        history = loaded.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    expected = outcome(plain, plain.history)
    compare(expected, outcome(loaded, history))


def loaded_on_the_chief_alone() -> None:
    """Other ranks take over what the chief has loaded: no shared disk is needed."""
    fresh()
    x, y = rows("even")
    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile("sgd", "mse")
        path = folder() / f"only_{kdist.rank()}.weights.h5"
        if kdist.is_chief():
            other = mlp()
            for variable in other.trainable_variables:
                variable.assign(np.full(variable.shape, 0.25))
            other.save_weights(path)
            model.load_weights(path)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_equal_everywhere(weights_of(model))
    reference = mlp()
    for variable in reference.trainable_variables:
        variable.assign(np.full(variable.shape, 0.25))
    np.testing.assert_allclose(predicted, np.asarray(reference(x)), rtol=1e-12)


def cloned() -> None:
    """`clone_model` in the scope gives a model that is distributed too."""
    fresh()
    x, y = rows("ragged")

    def clone(batch: int) -> dict[str, Any]:
        original = mlp()
        model = keras.models.clone_model(original)
        model.set_weights(original.get_weights())
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0))

    plain = clone(size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = clone(BATCH)
    compare(plain, ours)


def distributed_after_the_scope_is_left() -> None:
    fresh()
    x, y = rows("ragged")

    def make() -> keras.Model:
        model = mlp()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def use(model: keras.Model, batch: int) -> dict[str, Any]:
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_split=0.25, verbose=0)
        return outcome(
            model,
            history,
            tested=model.evaluate(x, y, batch_size=batch, verbose=0),
            predicted=model.predict(x, batch_size=batch, verbose=0),
        )

    plain = use(make(), size() * BATCH)
    with kdist.scope(scale_lr=None):
        model = make()
    compare(plain, use(model, BATCH))


def outside_of_the_scope_nothing_is_changed() -> None:
    """A model made after the scope is left is Keras' own: each rank trains it alone."""
    with kdist.scope(scale_lr=None):
        pass
    model = mlp()
    assert not {"fit", "train_step", "_kdist"} & set(vars(model))
    assert keras.Model.fit.__module__.startswith("keras.")
    x, y = rows("even")
    model.compile("sgd", "mse")
    history = model.fit(x, y, batch_size=BATCH, verbose=0)
    assert model.optimizer.iterations.numpy() == -(-len(x) // BATCH)
    assert history.params["steps"] == -(-len(x) // BATCH)


def scopes_with_other_scaling_follow_each_other() -> None:
    """Each fold of a k-fold has its own scope; the rate of one does not leak into the next."""
    x, y = rows("even")

    def fold(rate: float, batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(rate), "mse")
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return {"weights": [np.asarray(v) for v in model.weights]}

    for factor, scale_batch in ((None, True), (3.0, True), (None, False), (0.5, True)):
        rate, batch = 0.01 * (factor or 1.0), size() * BATCH if scale_batch else BATCH
        plain = of_the_chief(lambda rate=rate, batch=batch: fold(rate, batch))
        fresh()
        with kdist.scope(scale_lr=factor, warmup_epochs=0, scale_batch=scale_batch):
            ours = fold(0.01, BATCH)
        compare(plain, ours)


def models_and_their_data_are_let_go() -> None:
    """Model after model in one process, as in a search for good settings, leaves nothing behind."""
    x, y = rows("ragged")

    def train(kind: str) -> None:
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(**fed(kind, (x, y), BATCH), validation_data=(x, y), verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)

    with kdist.scope():
        for kind in ("arrays", "tf_data"):
            train(kind)
    gc.collect()
    left = [type(each).__name__ for each in gc.get_objects() if issubclass(type(each), keras.Model | Source)]
    assert not left, left


CASES = {
    function.__name__: function
    for function in (
        saved_on_the_chief_and_on_all,
        loaded_in_a_scope_goes_on_distributed,
        loaded_on_the_chief_alone,
        cloned,
        distributed_after_the_scope_is_left,
        outside_of_the_scope_nothing_is_changed,
        scopes_with_other_scaling_follow_each_other,
        models_and_their_data_are_let_go,
    )
}
