"""Weights that callbacks write by themselves: on one rank, on all ranks alike, or other ones on each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np

import kdist
from kdist._engine import open_engine
from kdist.state.broadcast import broadcast_in_groups
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, both, compare, fed, fit_alone, fresh, mlp, of_the_chief, rows, size


class Writes(keras.callbacks.Callback):
    """Calls a function of the model at one moment of each epoch, or at each batch."""

    def __init__(self, moment: str, write: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        setattr(self, moment, lambda number, logs=None: write(self.model))


def held_by_all(model: keras.Model) -> list[Any]:
    """Returns the weights, which all ranks hold."""
    held = [np.asarray(each).tolist() for each in model.weights]
    everyone = open_engine(kdist.cluster_info()).gather_objects(held)
    assert all(each == held for each in everyone)
    return held


def unlike(model: keras.Model) -> None:
    kernel = model.layers[0].kernel
    kernel.assign(kernel + (kdist.rank() + 1.0))


@feature
def weights_that_a_callback_makes_different() -> None:
    """Before the next epoch, and after the last one, ranks have rank 0's, and a warning names the variable."""
    x, y = rows("even")
    for strategy in (kdist.AllReduce(), kdist.AllReduce(sync_every=2), kdist.AllReduce(shard="optimizer")):
        for moment in ("on_epoch_begin", "on_epoch_end"):
            fresh()
            with logged() as said, kdist.scope(strategy, scale_lr=None):
                model = mlp()
                model.compile(keras.optimizers.SGD(0.0), "mse")  # so that what was written can be seen
                kernel = model.layers[0].get_weights()[0]
                model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Writes(moment, unlike)])
            np.testing.assert_allclose(held_by_all(model)[0], kernel + 2.0)  # rank 0 has added 1 twice
            warnings = [each for each in said if "differs between the ranks" in each]
            assert [each.split()[0] for each in warnings] == [repr(model.layers[0].kernel.path)] * kdist.is_chief()
            assert all("model.set_weights" in each for each in warnings)


@feature
def slots_follow_weights_that_a_callback_makes_different() -> None:
    """FTRL computes weights from its slots, and averages follow them: each rank's own would come back in a step."""
    x, y = rows("even")

    def write(model: keras.Model) -> None:
        unlike(model)
        for slot in model.optimizer.variables[2:]:
            slot.assign(slot + kdist.rank() + 1.0)

    for make in (keras.optimizers.Ftrl, lambda rate: keras.optimizers.SGD(rate, use_ema=True)):
        with kdist.scope(scale_lr=None):
            model = mlp()
            model.compile(make(0.05), "mse")
            model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Writes("on_epoch_begin", write)])
        held_by_all(model)
        slots = [np.asarray(each).tolist() for each in model.optimizer.variables]
        assert all(each == slots for each in open_engine(kdist.cluster_info()).gather_objects(slots))


@feature
def averages_that_the_chief_alone_swaps_in_between_epochs() -> None:
    """No rank takes them over: they are back when the next epoch begins, but for the rounding of Keras' swap."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if kdist.is_chief() else []
        return fit_alone(model, fed("arrays", (x, y), batch), callbacks=callbacks)

    both(script)


@feature
def weights_that_a_rank_loads_into_a_part_of_the_model() -> None:
    """A model within the one that is trained, or one that shares its layers: the other ranks get them in the step."""
    x, y = rows("even")

    def trained(part_of: Callable[[keras.Model], keras.Model]) -> tuple[keras.Model, list[str]]:
        def load(model: keras.Model) -> None:
            if kdist.rank() == size() - 1:
                part = part_of(model)
                part.set_weights([np.full(each.shape, 0.25) for each in part.weights])

        fresh()
        with logged() as said, kdist.scope(scale_lr=None):
            encoder = mlp()
            inputs = keras.Input((5,))
            model = keras.Model(inputs, keras.layers.Dense(2)(encoder(inputs)))
            model.compile(keras.optimizers.SGD(0.0), "mse")
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Writes("on_train_batch_end", load)])
        return model, said

    def around(model: keras.Model) -> keras.Model:
        outputs = keras.layers.Dense(1)(model.layers[1](model.inputs[0]))
        return keras.Model(model.inputs, outputs)

    for part_of in (lambda model: model.layers[1], around):
        model, said = trained(part_of)
        held_by_all(model)
        assert all(np.all(np.asarray(each) == 0.25) for each in model.layers[1].weights)
        assert not [each for each in said if "differs between the ranks" in each]


def clip(model: keras.Model) -> None:
    model.set_weights([np.clip(each, -0.3, 0.3) for each in model.get_weights()])


@feature
def weights_that_all_ranks_clip_after_each_step() -> None:
    """As one process does; the weights are compared, and sent by nobody."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch), callbacks=[Writes("on_train_batch_end", clip)])

    with mock.patch("kdist.state.broadcast.broadcast_in_groups", wraps=broadcast_in_groups) as broadcast:
        both(script)
    assert broadcast.called
    assert not any(len(call.args[1]) for call in broadcast.call_args_list)


def averaged_by_hand(every: int) -> dict[str, Any]:
    """Trains a model for each rank on its own batches, clipped after each step, and averages them.

    Ranks come together after the first step of a `fit`, too: they know at once that weights were written.
    """
    x, y = rows("even")
    models = [compiled() for _ in range(size())]
    steps = len(x) // BATCH // size()
    for epoch in range(2):
        count = 0
        for step in range(steps):
            for rank, model in enumerate(models):
                start = (step * size() + rank) * BATCH
                model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
                clip(model)
            count += 1
            if count < every and step < steps - 1 and (epoch, step) != (0, 0):
                continue
            count = 0
            means = [np.mean(each, axis=0) for each in zip(*(model.get_weights() for model in models), strict=True)]
            for model in models:
                model.set_weights(means)
        for slots in zip(*(model.optimizer.variables for model in models), strict=True):
            if slots[0].name not in ("iteration", "learning_rate"):
                mean = np.mean([np.asarray(each) for each in slots], axis=0)
                for each in slots:
                    each.assign(mean)
    return {"weights": models[0].get_weights()}


def compiled() -> keras.Model:
    model = mlp()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


@feature
def weights_that_all_ranks_that_train_by_themselves_clip() -> None:
    """The mean is of what all have clipped, and none of their work is lost; an outer SGD takes no part in it."""
    x, y = rows("even")
    plain = of_the_chief(functools.partial(averaged_by_hand, 2))
    for options in ({}, {"outer_learning_rate": 0.7, "outer_momentum": 0.9}):
        fresh()
        with kdist.scope(kdist.AllReduce(sync_every=2, **options)):
            model = compiled()
            data = fed("arrays", (x, y), BATCH)
            model.fit(**data, epochs=2, verbose=0, callbacks=[Writes("on_train_batch_end", clip)])
        held_by_all(model)
        compare(plain, {"weights": model.get_weights()})


@feature
def weights_that_all_ranks_load() -> None:
    """Between two averages and without: they hold what was loaded; rank 0's, with a warning, where they differ."""
    x, y = rows("even")
    outer = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    ways: list[tuple[kdist.AllReduce, bool]] = [
        (kdist.AllReduce(), True),
        (kdist.AllReduce(), False),
        (kdist.AllReduce(sync_every=3, **outer), True),
    ]
    for strategy, is_equal in ways:

        def load(model: keras.Model, is_equal: bool = is_equal) -> None:
            value = 0.25 if is_equal else 0.25 + kdist.rank()
            model.set_weights([np.full(each.shape, value) for each in model.weights])

        fresh()
        with logged() as said, kdist.scope(strategy, scale_lr=None):
            model = mlp()
            model.compile(keras.optimizers.SGD(0.0), "mse")
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Writes("on_train_batch_end", load)])
        assert all(np.all(np.asarray(each) == 0.25) for each in held_by_all(model))
        warnings = [each for each in said if "differs between the ranks" in each]
        assert bool(warnings) == (not is_equal and kdist.is_chief())
