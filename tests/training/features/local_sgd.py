"""Local SGD: ranks that average their weights every few steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import kdist
from kdist._engine import open_engine
from kdist.errors import ScopeError, StrategyError
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    both,
    compare,
    deterministic_weights,
    fed,
    fit_alone,
    fresh,
    mlp,
    of_the_chief,
    outcome,
    rows,
    size,
)


def normalised_mlp() -> keras.Model:
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(momentum=0.7), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    deterministic_weights(model)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def local_sgd(every: int, rate: float, momentum: float) -> dict[str, Any]:
    """Trains as many models as there are ranks, each on its own batches, and averages them by hand."""
    x, y = rows("even")
    models = [normalised_mlp() for _ in range(size())]
    common = models[0].get_weights()
    velocity = [np.zeros_like(each) for each in common]
    trained = [any(each is v for v in models[0].trainable_variables) for each in models[0].weights]
    steps, losses = len(x) // BATCH // size(), []
    for _ in range(2):
        count, of_the_epoch = 0, []
        for step in range(steps):
            for rank, model in enumerate(models):
                start = (step * size() + rank) * BATCH
                model.reset_metrics()
                of_the_epoch.append(model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH]))
            count += 1
            if count < every and step < steps - 1:
                continue
            count = 0
            means = [np.mean(each, axis=0) for each in zip(*(model.get_weights() for model in models), strict=True)]
            for place, is_weight in enumerate(trained):
                moved = common[place] - means[place]
                velocity[place] = momentum * velocity[place] + moved
                nesterov = moved + momentum * velocity[place]
                common[place] = common[place] - rate * nesterov if is_weight else means[place]
            for model in models:
                model.set_weights(common)
        losses.append(np.mean(of_the_epoch))
        for slots in zip(*(model.optimizer.variables for model in models), strict=True):
            if slots[0].name not in ("iteration", "learning_rate"):
                mean = np.mean([np.asarray(each) for each in slots], axis=0)
                for each in slots:
                    each.assign(mean)
    return {**outcome(models[0]), "history": {"loss": losses}}


@feature
def ranks_that_train_by_themselves() -> None:
    """Between two averages each rank's steps are those of one process on its batches."""
    x, y = rows("even")
    for every, rate, momentum in ((2, 1.0, 0.0), (2, 0.7, 0.9), (5, 0.7, 0.9)):
        plain = of_the_chief(functools.partial(local_sgd, every, rate, momentum))
        fresh()
        strategy = kdist.AllReduce(sync_every=every, outer_learning_rate=rate, outer_momentum=momentum)
        with kdist.scope(strategy):
            ours = fit_alone(normalised_mlp(), fed("arrays", (x, y), BATCH))
        compare(plain, ours, 1e-9)


@feature
def an_average_of_each_step_is_a_sum_of_gradients() -> None:
    """Of plain SGD: ranks that average after a step made on the same weights. Eagerly too."""
    x, y = rows("even")

    def trained(strategy: kdist.AllReduce, **compiled: Any) -> dict[str, Any]:
        fresh()
        with kdist.scope(strategy, scale_lr=None):
            model = mlp()
            model.compile(keras.optimizers.SGD(0.05), "mse", **compiled)
            return fit_alone(model, fed("arrays", (x[: BATCH * size()], y[: BATCH * size()]), BATCH))

    # An epoch is one step here, and the ranks come together at its end.
    expected = trained(kdist.AllReduce())
    for compiled in ({}, {"run_eagerly": True}):
        compare(expected, trained(kdist.AllReduce(sync_every=4), **compiled), 1e-9)


@feature
def ranks_that_train_by_themselves_end_alike() -> None:
    """Whatever the data, the optimizer and the way a step is made; state that no step writes stays what it is."""
    x, y = rows("one short")
    ways: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        ("arrays", lambda: keras.optimizers.Adam(0.01), {"steps_per_execution": 2}),
        ("tf_data_unknown", lambda: keras.optimizers.SGD(0.05, momentum=0.9), {}),
        ("generator", lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), {"jit_compile": True}),
        ("py_dataset", lambda: keras.optimizers.RMSprop(0.01), {"run_eagerly": True}),
    ]
    for kind, optimizer, compiled in ways:
        with kdist.scope(kdist.AllReduce(sync_every=2, outer_learning_rate=0.7, outer_momentum=0.9)):
            normalise = keras.layers.Normalization()
            normalise.adapt(np.concatenate([x, x / 3]))
            constants = [np.asarray(each).tolist() for each in normalise.weights]
            layers = [normalise, keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
            model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(2)])
            model.compile(optimizer(), "mse", metrics=["mae"], **compiled)
            history = model.fit(**fed(kind, (x, y), BATCH), epochs=3, verbose=0, validation_data=(x[:3], y[:3]))
        held = [np.asarray(each).tolist() for each in [*model.weights, *model.optimizer.variables]]
        said = open_engine(kdist.cluster_info()).gather_objects([held, history.history])
        assert all(each == said[0] for each in said), kind
        assert [np.asarray(each).tolist() for each in normalise.weights] == constants, kind


@feature
def state_that_some_of_the_ranks_that_train_by_themselves_write() -> None:
    """In eager steps, where each rank knows of itself only; sums are exact, as increments are summed."""

    class Watch(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            settings: dict[str, Any] = {"shape": (), "trainable": False, "initializer": "zeros"}
            self.total = self.add_weight(aggregation="sum", **settings)
            self.chiefs = self.add_weight(dtype="int32", **settings)  # without a rule: rank 0's
            self.steps = self.add_weight(dtype="int32", aggregation="mean", **settings)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.steps.assign_add(1)
                if kdist.rank() == size() - 1:
                    self.total.assign_add(1.0)
                    self.chiefs.assign_add(1)
            return inputs

    x, y = rows("even")
    with kdist.scope(kdist.AllReduce(sync_every=2), scale_lr=None):
        watch = Watch()
        model = keras.Sequential([keras.Input((5,)), watch, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    steps = 2 * len(x) // BATCH // size()
    assert [float(each.numpy()) for each in watch.weights] == [steps, 0, steps]


@feature
def all_that_a_step_of_the_users_writes_is_averaged() -> None:
    """Frozen weights that follow others too; a constraint holds afterwards; what nobody writes stays what it is."""

    class Taught(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.student = keras.layers.Dense(2, kernel_constraint=keras.constraints.UnitNorm())
            self.teacher = keras.layers.Dense(2, trainable=False)
            self.constant = keras.layers.Dense(2, trainable=False)

        def call(self, inputs: Any) -> Any:
            return self.student(inputs) + self.teacher(inputs) + self.constant(inputs)

        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            for follower, followed in zip(self.teacher.weights, self.student.weights, strict=True):
                follower.assign(0.9 * follower + 0.1 * followed)
            return logs

    x, y = rows("even")
    with kdist.scope(kdist.AllReduce(sync_every=2, outer_learning_rate=0.7, outer_momentum=0.9), scale_lr=None):
        model = Taught()
        model(x[:1])
        deterministic_weights(model)
        teacher, constant = (layer.get_weights()[0].tolist() for layer in (model.teacher, model.constant))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    held = [each.tolist() for each in model.get_weights()]
    assert all(each == held for each in open_engine(kdist.cluster_info()).gather_objects(held))
    assert model.teacher.get_weights()[0].tolist() != teacher
    assert model.constant.get_weights()[0].tolist() == constant
    np.testing.assert_allclose(np.linalg.norm(model.student.get_weights()[0], axis=0), 1.0, rtol=1e-6)


@feature
def weights_that_a_rank_loads_win_over_an_average() -> None:
    """Between two averages, at the end of an epoch, and after a training that was broken off."""
    x, y = (np.concatenate([each] * 2) for each in rows("even"))
    wanted = [np.full_like(each, 0.25) for each in normalised_mlp().get_weights()]

    class Load(keras.callbacks.Callback):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == self.at and kdist.rank() == size() - 1:
                self.model.set_weights(wanted)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append([np.asarray(each).tolist() for each in self.model.get_weights()])

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise RuntimeError("broken off")

    found: list[Any] = []
    with kdist.scope(kdist.AllReduce(sync_every=3, outer_learning_rate=0.7, outer_momentum=0.9), scale_lr=None):
        model = normalised_mlp()
        model.compile(keras.optimizers.SGD(0.0), "mse")  # so that what was loaded can be seen
        fit = functools.partial(model.fit, x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert len(x) == 6 * BATCH * size()
        for at in (5, 3):  # in the epoch's last step, which ends with an average, and between two
            start = model.get_weights()
            fit(callbacks=[Load(at)])
            model.set_weights(start)
        with pytest.raises(RuntimeError, match="broken off"):
            fit(callbacks=[Break()])
        model.set_weights(wanted)
        fit(callbacks=[Load(3)])
    trained = [place for place, each in enumerate(model.weights) if each.trainable]
    for weights in found:
        assert [weights[place] for place in trained] == [wanted[place].tolist() for place in trained]


@feature
def weights_that_all_ranks_load_after_they_have_diverged() -> None:
    """They are what was loaded, to the bit, and not a mean of differences from weights that are infinite."""
    x, y = (np.concatenate([each] * 2) for each in rows("even"))

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 4:
                raise FloatingPointError("diverged")

    for unlike in (0.0, 1.0):
        with kdist.scope(kdist.AllReduce(sync_every=2), scale_lr=None):
            model = normalised_mlp()
            model.compile(keras.optimizers.SGD(1e150), "mse")
            fit = functools.partial(model.fit, x, y, batch_size=BATCH, shuffle=False, verbose=0)
            good = [each / 3 for each in model.get_weights()]
            with pytest.raises(FloatingPointError):
                fit(callbacks=[Break()])
            assert not all(np.all(np.isfinite(each)) for each in model.get_weights())
            model.set_weights([each + unlike * kdist.rank() for each in good])
            model.optimizer.learning_rate = 0.0
            model.evaluate(x, y, batch_size=BATCH, verbose=0)
            for weight, loaded in zip(model.weights, good, strict=True):
                if weight.trainable:
                    mean = loaded + unlike * (size() - 1) / 2
                    np.testing.assert_allclose(np.asarray(weight), mean, rtol=1e-6 * unlike)
            fit()
            assert all(np.all(np.isfinite(each)) for each in model.get_weights())


@feature
def one_of_the_ranks_that_train_by_themselves_stops() -> None:
    """All stop with the next average or save, and hold the same; what looks into steps of all ranks is refused."""
    x, y = (np.concatenate([each] * 4) for each in rows("even"))

    class Stop(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if batch == 1 and kdist.rank() == size() - 1:
                self.model.stop_training = True

    with kdist.scope(kdist.AllReduce(sync_every=3), scale_lr=None):
        model, engine = normalised_mlp(), open_engine(kdist.cluster_info())
        folder = engine.broadcast_object(tempfile.mkdtemp() if kdist.is_chief() else None)
        for expected, others in ((3, []), (2, [kdist.callbacks.BackupAndRestore(folder, save_freq=2)])):
            stop = Stop()
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[stop, *others])
            held = [np.asarray(each).tolist() for each in [*model.weights, *model.optimizer.variables]]
            said = engine.gather_objects([stop.steps, held])
            assert all(each == said[0] for each in said)
            assert stop.steps == expected
        for refused in (kdist.callbacks.ReplicaCheck(), kdist.callbacks.NaNPolicy()):
            with pytest.raises(ScopeError, match="sync_every=3"):
                model.fit(x, y, verbose=0, callbacks=[refused])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        with pytest.raises(StrategyError, match="mixed_bfloat16"):
            model.fit(x, y, verbose=0)


@feature
def an_evaluation_within_an_epoch_of_ranks_that_train_by_themselves() -> None:
    """A metric that is no sum goes on counting each rank's rows, which are added up when the epoch ends."""
    x, y = rows("even")

    class Rows(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="rows")
            self.counted = self.add_variable((), "zeros", name="counted")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.counted.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], self.dtype))

        def result(self) -> Any:
            return self.counted + 0.0

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.evaluate(x[:BATCH], y[:BATCH], verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile("sgd", "mse", metrics=[Rows()])
        history = model.fit(x, y, batch_size=batch, verbose=0, callbacks=[Evaluates()])
        return {"rows": history.history["rows"]}

    both(script, strategy=kdist.AllReduce(sync_every=2))
