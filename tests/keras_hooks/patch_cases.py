"""Patches last as long as their table says: cases for `tests/test_scope.py`."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist.keras_hooks.patching import patched
from tests.keras_hooks.durations import Places, changed, places


class Moments(keras.callbacks.Callback):
    """Notes what stands at the places of the table at the moments of a `fit`, and within its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, Places] = {}
        self.in_step: list[Places] = []
        self.is_on = False

    def note_in_step(self) -> None:
        """Called by layers, losses, metrics and optimizers."""
        if self.is_on:
            self.in_step.append(places())

    def on_train_begin(self, logs=None):
        self.in_step.clear()

    def on_epoch_begin(self, epoch, logs=None):
        self.at["epoch begin"] = places()

    def on_train_batch_begin(self, batch, logs=None):
        self.at["batch begin"] = places()
        self.is_on = True

    def on_train_batch_end(self, batch, logs=None):
        self.is_on = False
        self.at["batch end"] = places()

    def on_epoch_end(self, epoch, logs=None):
        self.at["epoch end"] = places()


def model_that_notes(moments: Moments, **compiled: Any) -> keras.Model:
    class Noting(keras.layers.Dense):
        def call(self, inputs, **kwargs):
            moments.note_in_step()
            return super().call(inputs, **kwargs)

    class NotingSGD(keras.optimizers.SGD):
        def update_step(self, *args):
            moments.note_in_step()
            super().update_step(*args)

    def loss(y_true, y_pred):
        moments.note_in_step()
        return keras.losses.mean_squared_error(y_true, y_pred)

    def metric(y_true, y_pred):
        moments.note_in_step()
        return keras.losses.mean_absolute_error(y_true, y_pred)

    inner = NotingSGD(0.1, momentum=0.9, clipnorm=1.0)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.BatchNormalization(),
            Noting(3, activity_regularizer="l2"),
            keras.layers.Dropout(0.5),
            Noting(1),
        ]
    )
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss, metrics=[metric], run_eagerly=True, **compiled)
    return model


def writers(folder: str) -> list[keras.callbacks.Callback]:
    return [
        keras.callbacks.CSVLogger(Path(folder, "log.csv")),
        keras.callbacks.ModelCheckpoint(Path(folder, "best.keras"), save_best_only=True, monitor="loss"),
        kdist.callbacks.Throughput(),
    ]


def fit_twice(moments: Moments, folder: str, more: tuple[type, ...]) -> dict[str, Places]:
    """Fits, so that all is built, and again; returns what stood at the places before the second time and after it."""
    model, callbacks = model_that_notes(moments), [*writers(folder), *(each() for each in more), moments]
    found = {}
    for moment in ("before fit", "after fit"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0, callbacks=callbacks)
        found[moment] = places()
    return found


def patched_at_each_moment(strategy: Any, *more: type) -> set[str]:
    """Checks a scope with a `fit`: at each moment only that is patched whose time it is; returns all times seen."""
    outside = places()
    with kdist.scope(strategy), tempfile.TemporaryDirectory() as folder:
        moments = Moments()
        at = {**fit_twice(moments, folder, more), **moments.at}
    lasting = {
        ("a scope", "a callback's life"): [changed(outside, at["after fit"])],
        ("a call", "a fit"): [changed(at["before fit"], at["epoch begin"])],
        ("a pass",): [changed(at["epoch begin"], at["batch begin"])],
        ("a step", "`strategy.run`"): [changed(at["batch begin"], each) for each in moments.in_step],
    }
    for times, found in lasting.items():
        for each in found:
            wrong = {place: until for place, until in each.items() if not until & {*times}}
            assert not wrong, (times, wrong)
    for begin, end in (("batch begin", "batch end"), ("epoch begin", "epoch end"), ("before fit", "after fit")):
        assert changed(at[begin], at[end]) == {}, (begin, end)
    at.clear()
    del moments
    gc.collect()  # the callbacks
    left = changed(outside, places())
    assert left == {}, left
    return {until for found in lasting.values() for each in found for times in each.values() for until in times}


def case_patches_last_as_long_as_the_table_says():
    seen = patched_at_each_moment("auto", kdist.callbacks.NaNPolicy)
    seen |= patched_at_each_moment(kdist.AllReduce(shard="optimizer"))
    assert seen >= {"a scope", "a callback's life", "a call", "a fit", "a step"}, seen


def case_a_patch_that_does_not_end_is_seen():
    before = places()
    with patched(keras.metrics.Mean, "update_state", print):
        assert changed(before, places()) == {"Mean.update_state": {"a step"}}
    assert changed(before, places()) == {}
    metric = keras.metrics.Mean()
    before = places()
    with patched(metric, "result", print):
        assert changed(before, places()) == {"Mean.result": {"a step"}}
    variable = tf.Variable(0.0)
    del variable
