"""One state and the same logs on all ranks: ReplicaCheck, MetricAverage, ChiefOnly."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import kdist
from kdist.callbacks import ChiefOnly, MetricAverage, ReplicaCheck
from kdist.errors import EngineError, MismatchError, NotSynchronizedError, ScopeError
from kdist.state.variables import ModelState
from tests.callbacks.alone import engine, own_loop
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere, everyone
from tests.training.fidelity import BATCH, fed, fresh, mlp, rows, size

LAST = -1  # the last rank, as an index of lists


def state_of(model: keras.Model) -> list[Any]:
    return [np.asarray(v).tolist() for v in ModelState(model).numeric()]


def data(num_steps: int = 6, in_scope: bool = True) -> dict[str, Any]:
    n = num_steps * BATCH * (size() if in_scope else 1)
    generator = np.random.default_rng(5)
    return {"x": generator.normal(size=(n, 5)), "y": generator.normal(size=(n, 2)), "batch_size": BATCH, "verbose": 0}


class At(keras.callbacks.Callback):
    """Does something at one moment, on one rank."""

    def __init__(self, moment: str, number: int, rank: int, act: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self._number, self._rank, self._act = number, rank % size(), act
        setattr(self, moment, self._do)

    def _do(self, number: int, logs: Any = None) -> None:
        if number == self._number and kdist.rank() == self._rank:
            self._act(self.model)


def spoil(place: int) -> Callable[[keras.Model], None]:
    """Returns what changes one number of the variable at a place by next to nothing."""

    def act(model: keras.Model) -> None:
        variable = ModelState(model).variables()[place]
        value = np.array(variable)
        value.flat[-1] += 1e-12
        variable.assign(value)

    return act


# Without a scope, and in one that needs none of them.


def without_a_scope_the_engine_must_be_given() -> None:
    model = own_loop()
    for callback in (ReplicaCheck(), MetricAverage(), ChiefOnly(keras.callbacks.Callback())):
        with pytest.raises(ScopeError, match=f"(?s){type(callback).__name__}.*engine="):
            model.fit(**data(in_scope=False), callbacks=[callback])


def in_the_scope_it_changes_nothing() -> None:
    def trained(*callbacks: Any) -> Any:
        fresh()
        with kdist.scope():
            model = mlp()
            model.compile("adam", "mse")
            history = model.fit(**data(), epochs=2, callbacks=list(callbacks))
        return [state_of(model), history.history]

    callbacks = [ReplicaCheck(2), MetricAverage()]
    assert trained(*callbacks) == trained()


# ReplicaCheck.


def checked(action: str, rank: int, place: int, *, alone: bool = False, every: int = 3) -> tuple[Any, list[str]]:
    """Trains six steps, one rank's variable spoilt after the fourth; returns the model and what was logged."""
    fresh()
    make = own_loop if alone else lambda optimizer: mlp_compiled(optimizer)
    given = {"engine": engine()} if alone else {}
    callbacks = [At("on_train_batch_end", 3, rank, spoil(place)), ReplicaCheck(every, action, **given)]
    with contextlib.nullcontext() if alone else kdist.scope(scale_lr=None), logged(logging.WARNING) as lines:
        model = make(keras.optimizers.SGD(0.01, momentum=0.9))
        try:
            model.fit(**data(in_scope=not alone), callbacks=callbacks)
        except NotSynchronizedError as error:
            lines.append(str(error))
    return model, lines


def mlp_compiled(optimizer: Any) -> keras.Model:
    model = mlp()
    model.compile(optimizer, "mse")
    return model


def ranks_that_differ_raise_on_all_ranks() -> None:
    """Named are the first variable, the step of the check, and whoever differs from most, the chief too."""
    for alone, rank, place in ((False, 1, 2), (True, 0, LAST - 1), (False, LAST, 3)):
        model, lines = checked("raise", rank, place, alone=alone)
        (line,) = assert_equal_everywhere(lines)
        # A velocity that differs makes the weight differ, which comes first.
        variable = ModelState(model).variables()[place] if place >= 0 else model.trainable_variables[-1]
        odd = rank % size() if size() > 2 else 1  # of two, the chief is taken for right
        assert f"after 6 steps, other values of {variable.path!r} on rank(s) [{odd}]" in line, line
        assert int(model.optimizer.iterations) == 6


def ranks_that_differ_are_warned_of_by_the_chief() -> None:
    """They go on as they are; as `fit` ends all take rank 0's weights, as without the callback."""
    model, lines = checked("warn", 1, 2)
    said = everyone(lines)
    assert [len(each) for each in said] == [2] + [0] * (size() - 1), said
    assert "rank(s) [1]" in said[0][0]
    assert "differs between the ranks, and is rank 0's on all of them now" in said[0][1]
    assert_equal_everywhere(state_of(model))


def ranks_that_differ_are_repaired() -> None:
    for rank in (0, 1):
        model, lines = checked("repair", rank, 2)
        right = 1 if size() > 2 and rank == 0 else 0
        assert f"rank {right} broadcasts its state" in everyone(lines)[0][0]
        assert_equal_everywhere(state_of(model))


def equal_ranks_are_left_alone() -> None:
    """Statistics, seeds, slots, averaged weights, a rate that one rank has just set: nothing of it is a difference."""
    fresh()
    with kdist.scope(), logged(logging.WARNING) as lines:
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9), "mse", metrics=["mae"])

        def halve(model: keras.Model) -> None:
            model.optimizer.learning_rate = 0.005

        arguments = {**data(), "validation_data": rows("ragged")}
        model.fit(**arguments, epochs=2, callbacks=[At("on_train_batch_end", 2, 1, halve), ReplicaCheck(1)])
        model.steps_per_execution = 4
        model.fit(**arguments, epochs=2, callbacks=[ReplicaCheck(5)])
    assert lines == []
    assert float(model.optimizer.learning_rate) == pytest.approx(0.005)


# MetricAverage.


class Adds(keras.callbacks.Callback):
    """Adds to the logs, on the ranks that have something to say."""

    def __init__(self, by_rank: list[dict[str, float]]) -> None:
        super().__init__()
        self._by_rank = by_rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs.update(self._by_rank[kdist.rank()])


def averages_count_true_samples() -> None:
    """In the scope, ragged: the last batch, of one row more than a rank's, is split."""
    ends = [-(-(BATCH + 1) * rank // size()) for rank in range(size() + 1)]
    num_rows = [2 * BATCH + stop - start for start, stop in itertools.pairwise(ends)]
    x, y = rows("ragged")
    values = [{"mine": float(rank + 1), "val_mine": float(rank + 1)} for rank in range(size())]
    values[0]["on_the_chief"] = 7.0
    values[1]["on_one"] = float("nan")
    with kdist.scope(scale_lr=None):
        model = mlp_compiled("sgd")
        plain = model.fit(**fed("arrays", (x, y), BATCH), verbose=0, validation_data=(x[:1], y[:1])).history
        model = mlp_compiled("sgd")
        callbacks = [Adds(values), MetricAverage()]
        history = model.fit(
            **fed("arrays", (x, y), BATCH), verbose=0, validation_data=(x[:1], y[:1]), callbacks=callbacks
        ).history
    assert history["loss"] == plain["loss"]
    expected = sum(n * (rank + 1) for rank, n in enumerate(num_rows)) / sum(num_rows)
    assert history["mine"] == [pytest.approx(expected)]
    assert history["val_mine"] == [1.0]  # one row of validation, which is the first rank's
    assert history["on_the_chief"] == [7.0]
    assert np.isnan(history.pop("on_one")).all()
    assert_equal_everywhere(history)


def averages_without_a_scope() -> None:
    fresh()
    mine = own_loop()
    rank = kdist.rank()
    n = BATCH * (rank + 1)
    x, y = np.ones((n, 5)) * rank, np.ones((n, 2))
    expected = everyone([float(np.mean((mine.predict(x, verbose=0) - y) ** 2)), n])
    mine.fit(x, y, batch_size=n, verbose=0, callbacks=[MetricAverage(engine=engine())])
    loss = assert_equal_everywhere(mine.history.history["loss"])
    assert loss == [pytest.approx(sum(v * n for v, n in expected) / sum(n for _, n in expected))]
    weights = [5.0, 0.0, *[0.0] * size()]
    values = [{"value": float(rank)} for rank in range(size())]
    for given in (weights[rank], lambda: weights[rank]):
        average = MetricAverage(given, engine=engine())
        assert mine.fit(x, y, batch_size=n, verbose=0, callbacks=[Adds(values), average]).history["value"] == [0.0]
    with pytest.raises(MismatchError, match="num_samples"):
        mine.fit(x, y, batch_size=n, verbose=0, callbacks=[Adds(values), MetricAverage(0, engine=engine())])


# ChiefOnly.


class Tries(keras.callbacks.Callback):
    """Tries what would wait for the other ranks, and what would not, and adds to its logs."""

    def __init__(self, *attempts: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.attempts = attempts
        self.said: list[str] = []
        self.calls: list[str] = []

    def set_params(self, params: Any) -> None:
        self.params = params

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(f"begin of {self.params['epochs']}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"batch {batch}")
        self._try()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch} {sorted(logs)}")
        logs["of_the_chief"] = 1.0
        self._try()

    def _try(self) -> None:
        for attempt in self.attempts:
            try:
                attempt(self.model)
                self.said.append("done")
            except EngineError as error:
                self.said.append(str(error))


def what_the_chief_starts_alone_is_refused() -> None:
    """In the midst of an epoch and at its end; the others go on, and all end with the same."""
    fresh()
    x = np.ones((3, 5))
    with kdist.scope(scale_lr=None):
        model = mlp_compiled("sgd")
        model.predict_on_batch(x)  # traced: nothing eager is left in a second call
        refused = Tries(
            lambda m: m.evaluate(x, np.ones((3, 2)), verbose=0),
            lambda m: m.predict(x, verbose=0),
            lambda m: m.predict_on_batch(x),
            lambda m: kdist.barrier(),
        )
        allowed = Tries(
            lambda m: m.get_metrics_result(), lambda m: float(m.optimizer.learning_rate), lambda m: m(x).numpy()
        )
        history = model.fit(**data(2), callbacks=[ChiefOnly(refused), ChiefOnly(allowed)])
    if kdist.is_chief():
        assert len(refused.said) == 3 * 4
        for said in refused.said:
            assert "ChiefOnly runs Tries.on_" in said, said
            assert "Fix: let all ranks run it" in said, said
        assert set(allowed.said) == {"done"}, allowed.said
        assert allowed.calls == ["begin of 1", "batch 0", "batch 1", "epoch 0 ['loss']"]
    else:
        assert refused.calls == allowed.calls == []
    assert list(assert_equal_everywhere(history.history)) == ["loss"]
    assert_equal_everywhere(state_of(model))


def a_callback_that_the_chief_alone_is_given() -> None:
    fresh()
    tries = Tries(lambda m: m.predict(np.ones((3, 5)), verbose=0))
    with kdist.scope(scale_lr=None):
        model = mlp_compiled("sgd")
        model.fit(**data(2), callbacks=[ChiefOnly(tries)] if kdist.is_chief() else [])
    assert [len(said) for said in everyone(tries.said)] == [3] + [0] * (size() - 1)
    assert_equal_everywhere(state_of(model))


def the_chiefs_wish_to_stop_is_everyones() -> None:
    fresh()
    with kdist.scope(scale_lr=None):
        model = mlp_compiled("sgd")
        stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: setattr(model, "stop_training", True))
        history = model.fit(**data(2), epochs=3, callbacks=[ChiefOnly(stop)])
    assert assert_equal_everywhere(history.epoch) == [0]


def without_a_scope_calls_of_the_engine_are_refused() -> None:
    fresh()
    model = own_loop()
    tries = Tries(lambda m: engine().barrier(), lambda m: m.predict(np.ones((3, 5)), verbose=0))
    model.fit(**data(2, in_scope=False), callbacks=[ChiefOnly(tries, engine=engine())])
    if kdist.is_chief():
        assert ["ChiefOnly runs Tries" in said for said in tries.said] == [True, False] * 3
        assert tries.said[1] == "done"
    engine().barrier()


CASES = {
    function.__name__: function
    for function in (
        without_a_scope_the_engine_must_be_given,
        in_the_scope_it_changes_nothing,
        ranks_that_differ_raise_on_all_ranks,
        ranks_that_differ_are_warned_of_by_the_chief,
        ranks_that_differ_are_repaired,
        equal_ranks_are_left_alone,
        averages_count_true_samples,
        averages_without_a_scope,
        what_the_chief_starts_alone_is_refused,
        a_callback_that_the_chief_alone_is_given,
        the_chiefs_wish_to_stop_is_everyones,
        without_a_scope_calls_of_the_engine_are_refused,
    )
}
