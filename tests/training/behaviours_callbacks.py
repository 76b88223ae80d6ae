"""What callbacks decide holds on all ranks, and nothing that one rank does alone waits for the others."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import kdist
from kdist._engine import open_engine
from kdist.errors import MismatchError
from kdist.keras_hooks.patching import original
from tests.training.behaviours import assert_equal_everywhere, everyone, weights_of
from tests.training.fidelity import BATCH, compare, fresh, mlp, of_the_chief, rows, size


def compiled(optimizer: Any = None, **kwargs: Any) -> keras.Model:
    model = mlp()
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", metrics=["mae", keras.metrics.R2Score()], **kwargs)
    return model


def train(model: keras.Model, callbacks: Any, **kwargs: Any) -> keras.callbacks.History:
    x, y = (np.concatenate([a] * 4) for a in rows("even"))
    return model.fit(
        x, y, **{"batch_size": BATCH, "verbose": 0, "validation_data": (x[:7], y[:7]), "callbacks": callbacks, **kwargs}
    )


STEPS = 12  # of an epoch of `train`


class Steps(keras.callbacks.Callback):
    """Notes how many steps each epoch had."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epochs[-1] += 1


class At(keras.callbacks.Callback):
    """Does something at one moment, on one rank."""

    def __init__(self, moment: str, number: int, rank: int | None, act: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self._number, self._rank, self._act = number, rank, act
        setattr(self, moment, self._do)

    def _do(self, number: int, logs: Any = None) -> None:
        if number == self._number and self._rank in (None, kdist.rank()):
            self._act(self.model)


def stop(model: keras.Model) -> None:
    model.stop_training = True


# Stopping.


def stopping_in_the_midst_of_an_epoch_as_in_one_process() -> None:
    """By one rank or by all: no step follows the one after which the callback asked."""
    with kdist.scope(scale_lr=None):
        model = compiled()  # traced once
    for rank in (*range(kdist.size()), None):
        for moment in ("on_train_batch_end", "on_train_batch_begin"):
            steps, before = Steps(), int(model.optimizer.iterations)
            history = train(model, [At(moment, 3, rank, stop), steps], epochs=3)
            assert assert_equal_everywhere(steps.epochs) == [4]
            assert model.stop_training is True
            assert int(model.optimizer.iterations) == before + 4
            assert_equal_everywhere([weights_of(model), history.history])


def a_stop_is_taken_back_as_in_one_process() -> None:
    """Where an epoch has ended, by a callback; between two calls of `train_on_batch`, by the script."""

    class TakeBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = False

    for rank in (1, None):
        steps = Steps()
        with kdist.scope(scale_lr=None):
            model = compiled()
            train(model, [At("on_train_batch_end", 1, rank, stop), TakeBack(), steps], epochs=3)
        assert assert_equal_everywhere(steps.epochs) == [2, 2, 2]
    accumulating = keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)
    for strategy, optimizer in ((kdist.AllReduce(sync_every=4), "sgd"), (kdist.AllReduce(), accumulating)):
        # A stop that is asked for before an epoch ends it after its first step.
        before = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: setattr(model, "stop_training", epoch == 1)  # noqa: B023
        )
        with kdist.scope(strategy, scale_lr=None):
            model = compiled(optimizer)
            train(model, [before], epochs=3)
        assert assert_equal_everywhere(int(model.optimizer._iterations)) == STEPS + 1
    with kdist.scope(scale_lr=None):
        model = compiled()
    batch = [a[: size()] for a in rows("even")]
    model.train_on_batch(*batch)
    model.stop_training = kdist.rank() == 1
    model.train_on_batch(*batch)
    assert model.stop_training is True
    model.stop_training = False
    model.train_on_batch(*batch)
    assert model.stop_training is False


def one_rank_ends_an_evaluation_or_a_prediction() -> None:
    """After the same batch on all ranks, also in the validation of `fit`."""
    x, y = (np.concatenate([a] * 4) for a in rows("even"))
    validations: list[int] = []
    count = keras.callbacks.Callback()
    count.on_test_batch_end = lambda batch, logs: validations.append(batch)  # type: ignore[method-assign]
    with kdist.scope(scale_lr=None):
        model = compiled()
        expected = model.evaluate(x[: 2 * size() * BATCH], y[: 2 * size() * BATCH], batch_size=BATCH, verbose=0)
        end = At("on_test_batch_end", 1, 1, lambda model: setattr(model, "stop_evaluating", True))
        found = model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[end])
        np.testing.assert_allclose(assert_equal_everywhere(found), expected)
        train(model, [end, count], epochs=1, validation_data=(x, y))
        assert assert_equal_everywhere(validations) == [0, 1]
        end = At("on_predict_batch_end", 1, 1, lambda model: setattr(model, "stop_predicting", True))
        assert len(model.predict(x, batch_size=BATCH, verbose=0, callbacks=[end])) == 2 * size() * BATCH


def one_rank_stops_unseen() -> None:
    """In a step of its own, or in a callback that is said not to look: the next step's message carries the wish."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer="ones")
            self.steps = 0

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            self.steps += 1
            self.stop_training = self.stop_training or (self.steps == 4 and kdist.rank() == 1)
            return super().train_step(data)

    unseen = At("on_train_batch_end", 3, 1, stop)
    unseen.reads_state_between_steps = False  # type: ignore[attr-defined]
    for make, callbacks in ((Own, []), (mlp, [unseen])):
        with kdist.scope(scale_lr=None):
            model = make()
            model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=make is Own)
            train(model, callbacks, epochs=3)
        assert assert_equal_everywhere(int(model.optimizer.iterations)) == 5
        assert_equal_everywhere(weights_of(model))


def one_rank_stops_in_the_last_step() -> None:
    """No step is left to carry the wish: it is agreed at the end of the epoch."""
    steps = Steps()
    with kdist.scope(scale_lr=None):
        model = compiled()
        train(model, [At("on_train_batch_end", STEPS - 1, 1, stop), steps], epochs=3)
    assert assert_equal_everywhere(steps.epochs) == [STEPS]


def one_rank_stops_at_the_end_of_an_epoch() -> None:
    for moment, steps_of_last in (("on_epoch_end", STEPS), ("on_epoch_begin", 1)):
        for seen in (True, False):
            steps = Steps()
            steps.reads_state_between_steps = seen  # type: ignore[attr-defined]
            with kdist.scope(scale_lr=None):
                model = compiled()
                history = train(model, [At(moment, 1, size() - 1, stop), steps], epochs=4)
            assert assert_equal_everywhere(steps.epochs) == [STEPS, steps_of_last]
            assert_equal_everywhere([weights_of(model), history.history])


def a_second_fit_is_not_stopped_by_the_first() -> None:
    steps = Steps()
    with kdist.scope(scale_lr=None):
        model = compiled()
        train(model, [At("on_train_batch_end", 2, 1, stop), steps])
        train(model, [steps], epochs=2)
    assert assert_equal_everywhere(steps.epochs)[1:] == [STEPS, STEPS]


def stopping_works_with_several_steps_an_execution() -> None:
    steps = Steps()
    with kdist.scope(scale_lr=None):
        model = compiled(steps_per_execution=4)
        train(model, [At("on_train_batch_end", 3, 1, stop), steps], epochs=3)
    assert len(assert_equal_everywhere(steps.epochs)) == 1
    assert_equal_everywhere(weights_of(model))


def early_stopping_as_in_one_process() -> None:
    """EarlyStopping and ReduceLROnPlateau, on validation metrics, with the best weights restored."""
    x, y = rows("ragged")
    noise = np.random.default_rng(4).normal(size=y.shape)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
        history = model.fit(
            x,
            y,
            batch_size=batch,
            epochs=30,
            shuffle=False,
            verbose=0,
            validation_data=(x, y + noise),
            callbacks=[
                keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5, min_delta=0.01),
                keras.callbacks.EarlyStopping(monitor="val_mae", patience=3, restore_best_weights=True, min_delta=0.01),
            ],
        )
        return {
            "history": history.history,
            "weights": [np.asarray(v) for v in model.weights],
            "rate": float(model.optimizer.learning_rate),
        }

    plain = of_the_chief(lambda: script(BATCH * size()))
    fresh()
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    assert len(plain["history"]["loss"]) < 30
    assert plain["rate"] < 0.3
    compare(plain, ours)


# The learning rate.


class Rates(keras.callbacks.Callback):
    """Notes the rate after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(round(float(self.model.optimizer.learning_rate), 6))


def halve(model: keras.Model) -> None:
    model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2


def one_rank_sets_the_rate_in_the_midst_of_an_epoch() -> None:
    """It acts in the same step on all ranks, the one after."""
    for rank in range(kdist.size()):
        rates = Rates()
        with kdist.scope(scale_lr=None):
            model = compiled(keras.optimizers.SGD(0.01, momentum=0.9))
            train(model, [rates, At("on_train_batch_end", 3, rank, halve)])
        # `rates` runs before the rate is set, so step 4 is the first to show it.
        assert assert_equal_everywhere(rates.rates) == [0.01] * 4 + [0.005] * (STEPS - 4)
        assert_equal_everywhere(weights_of(model))


def one_rank_sets_the_rate_at_the_end_of_an_epoch() -> None:
    rates = Rates()
    with kdist.scope(scale_lr=None):
        model = compiled()
        history = train(model, [At("on_epoch_end", 0, 1, halve), rates], epochs=2)
        assert_equal_everywhere(weights_of(model))
    assert assert_equal_everywhere(rates.rates) == [0.01] * STEPS + [0.005] * STEPS
    assert_equal_everywhere(history.history)


def one_rank_sets_the_rate_between_two_fits() -> None:
    with kdist.scope(scale_lr=None):
        model = compiled()
        train(model, [])
        if kdist.is_chief():
            model.optimizer.learning_rate = 0.002
        with pytest.raises(MismatchError, match="learning_rate of SGD"):
            train(model, [])
        model.optimizer.learning_rate = 0.004  # on all ranks
        rates = Rates()
        train(model, [rates])
    assert set(assert_equal_everywhere(rates.rates)) == {0.004}
    assert_equal_everywhere(weights_of(model))


def one_rank_restores_the_rate_or_sets_it_last() -> None:
    """On the chief alone when training begins, as BackupAndRestore does, or on any rank when the last epoch ends."""
    begins = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: halve(model))
    rates = Rates()
    with kdist.scope(scale_lr=None):
        model = compiled()
        train(model, [rates, *([begins] if kdist.is_chief() else [])])
        assert set(assert_equal_everywhere(rates.rates)) == {0.005}
        train(model, [At("on_epoch_end", 0, 1, halve)])
        rates = Rates()
        train(model, [rates])
    assert set(assert_equal_everywhere(rates.rates)) == {0.0025}
    assert_equal_everywhere(weights_of(model))


def schedulers_see_the_users_rate() -> None:
    """LearningRateScheduler with a function of the old rate; `learning_rate` in the logs is the user's."""
    with kdist.scope(scale_lr=4.0, warmup_epochs=0):
        model = compiled()
        history = train(
            model, [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)], epochs=3
        )
    np.testing.assert_allclose(history.history["learning_rate"], [0.01, 0.005, 0.0025], rtol=1e-6)
    np.testing.assert_allclose(history.history["effective_learning_rate"], [0.04, 0.02, 0.01], rtol=1e-6)
    assert_equal_everywhere([history.history, weights_of(model)])


# What one rank does alone.


class Reader(keras.callbacks.Callback):
    """Reads everything that can be read, wherever it is given."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._read()
        self.model.reset_metrics()

    def _read(self) -> None:
        model = self.model
        results = model.get_metrics_result()
        assert results
        assert all(np.isfinite(np.asarray(v)).all() for v in model.weights)
        assert [np.asarray(m.result()) for m in model.metrics]
        assert [np.asarray(v) for v in model.optimizer.variables]
        float(model.optimizer.learning_rate)
        model.summary(print_fn=lambda *_: None) if callable(getattr(model, "summary", None)) else None


def the_chief_alone_reads_everything() -> None:
    with kdist.scope():
        model = compiled(keras.optimizers.Adam(0.01))
        history = train(model, [Reader()] if kdist.is_chief() else None, epochs=2)
        if kdist.is_chief():
            model.get_metrics_result()
            model.reset_metrics()
            model.get_weights()
            model(np.zeros((2, 5)))
        train(model, [])
    assert_equal_everywhere([history.history, weights_of(model)])


def writers_given_on_the_chief_alone_or_on_all() -> None:
    """The files are the chief's, and the same whoever gives the callbacks."""
    root = open_engine(kdist.cluster_info()).broadcast_object(tempfile.mkdtemp() if kdist.is_chief() else None)
    for given_on_all in (False, True):
        mine = Path(root, f"{given_on_all}", f"rank{kdist.rank()}")
        mine.mkdir(parents=True)
        callbacks = [
            keras.callbacks.CSVLogger(str(mine / "log.csv")),
            keras.callbacks.ModelCheckpoint(str(mine / "{epoch}.keras")),
            keras.callbacks.ModelCheckpoint(str(mine / "best.weights.h5"), save_best_only=True, save_weights_only=True),
            keras.callbacks.TerminateOnNaN(),
        ]
        expected = ["1.keras", "2.keras", "best.weights.h5", "log.csv"]
        if importlib.util.find_spec("tensorboard"):
            callbacks.append(keras.callbacks.TensorBoard(str(mine / "board"), update_freq="batch"))
            expected.insert(3, "board")
        with kdist.scope():
            model = compiled()
            train(model, callbacks if given_on_all or kdist.is_chief() else [], epochs=2)
        written = sorted(os.listdir(mine))
        assert written == (expected if kdist.is_chief() else []), written
        assert_equal_everywhere(weights_of(model))
        kdist.barrier()


def a_callback_that_evaluates_and_predicts() -> None:
    """On all ranks, at the end of each epoch, on other data."""
    x, y = rows("ragged")
    found: list[Any] = []

    class Probe(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append(self.model.evaluate(x, y, verbose=0, batch_size=BATCH))
            found.append(self.model.predict(x, verbose=0, batch_size=BATCH).tolist())

    with kdist.scope():
        model = compiled()
        history = train(model, [Probe()], epochs=2)
    assert_equal_everywhere([found, history.history, weights_of(model)])
    assert len(found[1]) == len(x)


def logs_are_equal_on_all_ranks() -> None:
    """Epoch and validation logs, `history.epoch`, `params`, and the steps that callbacks see."""
    logged: list[Any] = []

    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logged.append([epoch, {key: np.asarray(value).tolist() for key, value in logs.items()}])

        def on_train_end(self, logs: Any = None) -> None:
            logged.append({key: np.asarray(value).tolist() for key, value in (logs or {}).items()})

        def on_test_end(self, logs: Any = None) -> None:
            logged.append({key: np.asarray(value).tolist() for key, value in (logs or {}).items()})

    with kdist.scope():
        model = compiled(keras.optimizers.Adam(0.01))
        history = train(model, [Logs()], epochs=3, validation_freq=2, initial_epoch=1)
    params = {key: value for key, value in history.params.items() if key != "verbose"}
    assert_equal_everywhere([logged, history.history, history.epoch, params])
    assert params["steps"] == STEPS
    assert len(everyone(logged)[0]) >= 3


@dataclasses.dataclass
class Counter(keras.callbacks.Callback):
    """Has no hash, as a dataclass with fields has none."""

    count: int = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.count += 1


def a_callback_that_is_a_dataclass() -> None:
    counter = Counter()
    with kdist.scope(), tempfile.TemporaryDirectory() as folder:
        train(compiled(), [counter, kdist.callbacks.Throughput(), kdist.callbacks.BackupAndRestore(folder)], epochs=2)
    assert counter.count == 2


class Before(keras.callbacks.Callback):
    """Measures a model before it is trained."""

    def on_train_begin(self, logs: Any = None) -> None:
        x, y = rows("even")
        self.loss = self.model.evaluate(x, y, verbose=0)[0]


def a_model_that_is_measured_when_training_begins() -> None:
    """It was made outside of the scope, with other weights on each rank: those of rank 0 are measured."""
    x, y = rows("even")
    before, model = Before(), compiled()
    for variable in model.trainable_variables:
        variable.assign_add(np.full(variable.shape, float(kdist.rank())))
    expected = everyone(model.evaluate(x, y, verbose=0)[0])[0]  # outside of the scope, each its own
    with kdist.scope():
        train(model, [before])
    np.testing.assert_allclose(before.loss, expected, rtol=1e-6)
    assert_equal_everywhere(weights_of(model))


def one_rank_loads_weights_before_fit() -> None:
    """The others get them, and that rank's optimizer is rank 0's."""
    with kdist.scope():
        model = compiled(keras.optimizers.SGD(0.0))
        model.fit(*rows("even"), batch_size=BATCH, verbose=0)
        steps_of_fit = int(model.optimizer.iterations)
        wanted = [np.full(each.shape, 3.0) for each in model.get_weights()]
        if kdist.rank() == kdist.size() - 1:
            model.set_weights(wanted)
            model.optimizer.iterations.assign(99)
        made = int(model.optimizer.iterations) if kdist.is_chief() else 0
        model.fit(*rows("even"), batch_size=BATCH, verbose=0)
        steps = everyone(int(model.optimizer.iterations))
        assert steps == [everyone(made)[0] + steps_of_fit] * kdist.size()
        for one, other in zip(wanted, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        # A file of weights has the optimizer's state, too.
        folder = tempfile.mkdtemp()
        if kdist.rank() == kdist.size() - 1:
            model.optimizer.iterations.assign(1000)
            original(model, "save_weights")(f"{folder}/w.weights.h5")
            model.load_weights(f"{folder}/w.weights.h5")
        model.fit(*rows("even"), batch_size=BATCH, verbose=0)
        assert everyone(int(model.optimizer.iterations)) == [1000 + steps_of_fit] * kdist.size()


class Holding(keras.callbacks.Callback):
    """Looks at what `fit` trains on, and holds none of it."""

    def on_train_end(self, logs: Any = None) -> None:
        self.data = weakref.ref(self.model._kdist.feed.training)


def what_fit_has_held_is_let_go() -> None:
    """The data with `fit`, and a model whose gradients were looked at with its last name."""
    x, y = rows("even")
    holding = Holding()
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[holding, kdist.callbacks.NaNPolicy()])
    gc.collect()
    assert holding.data() is None
    seen = weakref.ref(model)
    holding.set_model(None)
    del model
    gc.collect()
    assert seen() is None


CASES = {
    function.__name__: function
    for function in (
        stopping_in_the_midst_of_an_epoch_as_in_one_process,
        a_stop_is_taken_back_as_in_one_process,
        one_rank_ends_an_evaluation_or_a_prediction,
        one_rank_stops_unseen,
        one_rank_stops_in_the_last_step,
        one_rank_stops_at_the_end_of_an_epoch,
        a_second_fit_is_not_stopped_by_the_first,
        stopping_works_with_several_steps_an_execution,
        early_stopping_as_in_one_process,
        one_rank_sets_the_rate_in_the_midst_of_an_epoch,
        one_rank_sets_the_rate_at_the_end_of_an_epoch,
        one_rank_sets_the_rate_between_two_fits,
        one_rank_restores_the_rate_or_sets_it_last,
        schedulers_see_the_users_rate,
        the_chief_alone_reads_everything,
        writers_given_on_the_chief_alone_or_on_all,
        a_callback_that_evaluates_and_predicts,
        logs_are_equal_on_all_ranks,
        a_callback_that_is_a_dataclass,
        a_model_that_is_measured_when_training_begins,
        one_rank_loads_weights_before_fit,
        what_fit_has_held_is_let_go,
    )
}
