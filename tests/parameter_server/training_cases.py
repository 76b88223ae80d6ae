"""What a chief does with parameter servers: a script that every task of a cluster runs.

The chief runs the cases named on its command line and writes a report of each; the other tasks serve.
"""

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.errors import ScopeError, StrategyError
from kdist.parameter_server.staleness import staleness_logs
from kdist.state.session import session_of
from tests.helpers.logs import logged

RNG = np.random.default_rng(0)
X = RNG.normal(size=(130, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")
IDS = np.arange(130, dtype="float32")[:, None]
BATCHES = 9  # of 16 rows, the last one ragged


def scope(**options):
    return kdist.scope(kdist.ParameterServer(timeout=120, **options))


def classifier(optimizer=None, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kwargs.setdefault("metrics", ["accuracy"])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, **kwargs)
    return model


def iterations(model):
    return int(model.optimizer.iterations)


def twin(make, model):
    """Returns a plain model with the weights of another; call it outside of the scope."""
    plain = make()
    plain.set_weights(model.get_weights())
    return plain


def same(ours, theirs, rtol=1e-5):
    assert ours.keys() == theirs.keys(), (ours, theirs)
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=rtol, atol=1e-7, err_msg=key)


def without_staleness(history):
    return {key: value for key, value in history.items() if not key.startswith("staleness")}


class SeenOnce(keras.metrics.Metric):
    """Sums the rows' numbers and their squares: a row that is lost or seen twice changes one of them."""

    def __init__(self):
        super().__init__(name="seen")
        self.count = self.add_weight(name="count", initializer="zeros")
        self.squares = self.add_weight(name="squares", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.reduce_sum(tf.ones_like(y_true)))
        self.squares.assign_add(tf.reduce_sum(tf.square(y_true)))

    def result(self):
        return {"count": tf.identity(self.count), "squares": tf.identity(self.squares)}


# On any number of workers.


def case_each_sample_counts_once_an_epoch():
    with scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[SeenOnce()])
        seen = []
        remember = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
        model.fit(IDS, IDS, batch_size=16, epochs=4, verbose=0, callbacks=[remember], validation_data=(IDS, IDS))
        assert iterations(model) == 4 * BATCHES
        for logs in seen:
            assert logs["count"] == logs["val_count"] == 130
            assert logs["squares"] == logs["val_squares"] == float(np.sum(IDS**2))
        weights = model.get_weights()
        unlimited = tf.data.Dataset.from_tensor_slices((IDS, IDS)).shuffle(130).batch(16).filter(lambda x, y: True)
        model.fit(unlimited, epochs=2, verbose=0, callbacks=[remember])
        assert iterations(model) == 6 * BATCHES
        assert [logs["count"] for logs in seen[4:]] == [130, 130]
        assert any(np.any(before != after) for before, after in zip(weights, model.get_weights(), strict=True))


def case_evaluate_and_predict_are_those_of_one_process():
    def make():
        return classifier(metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="xent")])

    weights = np.linspace(0.1, 2, 130).astype("float32")
    with scope():
        model = make()
        model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
        ours = [
            model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True),
            model.evaluate(X, Y, sample_weight=weights, batch_size=7, verbose=0, return_dict=True),
            model.evaluate(tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), verbose=0, return_dict=True),
        ]
        predicted = model.predict(X, batch_size=16, verbose=0)
        on_batch = model.predict_on_batch(X[:5])
        model.reset_metrics()  # Keras 3.12's test_on_batch does not
        tested = model.test_on_batch(X[:50], Y[:50], return_dict=True)
    plain = twin(make, model)
    same(ours[0], plain.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True))
    same(ours[1], plain.evaluate(X, Y, sample_weight=weights, batch_size=7, verbose=0, return_dict=True))
    same(ours[2], ours[0])
    np.testing.assert_allclose(predicted, plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(on_batch, predicted[:5], rtol=1e-5, atol=1e-6)
    plain.reset_metrics()
    same(tested, plain.test_on_batch(X[:50], Y[:50], return_dict=True))


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index * 20 : index * 20 + 20], Y[index * 20 : index * 20 + 20]


def case_all_kinds_of_input():
    def generator():
        while True:
            yield X[:16], Y[:16]

    with scope():
        model = classifier()
        expected = 0
        for steps, args, kwargs in [
            (BATCHES, (X, Y), {"batch_size": 16, "class_weight": {0: 1.0, 1: 2.0}}),
            (7, (X, Y), {"batch_size": 16, "validation_split": 0.2}),
            (5, (Squares(),), {}),
            (6, (generator(),), {"steps_per_epoch": 6}),
            (4, (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat(),), {"steps_per_epoch": 4}),
        ]:
            model.fit(*args, **kwargs, verbose=0)
            expected += steps
            assert iterations(model) == expected, (args, kwargs)
        model.train_on_batch(X[:16], Y[:16])
        assert iterations(model) == expected + 1
        first = keras.Input((6,), name="first")
        second = keras.Input((), name="second", dtype="int64")
        joined = keras.layers.Concatenate()([first, keras.layers.Embedding(2, 3)(second)])
        two = keras.Model({"first": first, "second": second}, [keras.layers.Dense(1)(joined), joined])
        two.compile("adam", ["mse", None])
        two.fit({"first": X, "second": Y}, [Y.astype("float32"), X[:, :1]], batch_size=16, verbose=0)
        assert iterations(two) == BATCHES
        outputs = two.predict({"first": X, "second": Y}, batch_size=16, verbose=0)
        assert [each.shape for each in outputs] == [(130, 1), (130, 9)]
        np.testing.assert_array_equal(outputs[1][:, :6], X)


def case_steps_per_execution():
    with scope():
        model = classifier(steps_per_execution=4)
        ends = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append((batch, set(logs))))
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[note], validation_data=(X, Y))
        assert iterations(model) == 2 * BATCHES
        assert [end for end, _ in ends] == [3, 7, 11] * 2
        assert ends[-1][1] == {"accuracy", "loss"}
        assert len(history.history["val_loss"]) == 2


def case_callbacks_and_files():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        with scope():
            model = classifier()
            history = model.fit(
                X,
                Y,
                batch_size=16,
                epochs=9,
                verbose=0,
                validation_data=(X, Y),
                callbacks=[
                    keras.callbacks.ModelCheckpoint(path),
                    keras.callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=1),
                    keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01),
                ],
            )
            assert len(history.history["loss"]) == 2
            assert float(model.optimizer.learning_rate) == np.float32(0.01)
        loaded = keras.models.load_model(path)
        assert int(loaded.optimizer.iterations) == 2 * BATCHES
        for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3)

    def call(self, x, training=False):
        return self.dense(self.drop(self.norm(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, self(x, training=False))
        return {"my_loss": loss, **{m.name: m.result() for m in self.metrics if m.name != "loss"}}


def case_custom_train_step():
    with scope():
        model = OwnStep()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), loss, metrics=["accuracy"])
        history = model.fit(X, Y, batch_size=16, epochs=12, verbose=0).history
        assert iterations(model) == 12 * BATCHES
        assert np.all(np.isfinite(history["my_loss"]))
        assert len(set(history["my_loss"])) == 12  # the last batch's, of each epoch
        assert history["accuracy"][-1] > 0.7
        assert float(np.abs(model.norm.moving_mean.numpy()).max()) > 0


class StepOfFunctions(OwnStep):
    train_step = tf.function(OwnStep.train_step)
    test_step = tf.function(keras.Model.test_step)
    predict_step = tf.function(keras.Model.predict_step)


def case_steps_that_are_functions():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope():
        for is_set_on_the_instance in (False, True):
            keras.utils.set_random_seed(1)
            model = OwnStep() if is_set_on_the_instance else StepOfFunctions()
            if is_set_on_the_instance:
                model.train_step, model.test_step = tf.function(model.train_step), tf.function(model.test_step)
            model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
            history = model.fit(X, Y, batch_size=16, epochs=8, verbose=0, validation_data=(X, Y)).history
            assert iterations(model) == 8 * BATCHES
            assert history["accuracy"][-1] > 0.6, history
            right = np.argmax(model.predict(X, batch_size=16, verbose=0), 1) == Y
            np.testing.assert_allclose(history["val_accuracy"][-1], right.mean(), rtol=1e-5)


class WithoutCall(keras.Model):
    """As the GAN of Keras' guides: two models and a step."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]) for _ in range(2)]
        self.tracker = keras.metrics.Mean("both")

    def compile(self, *optimizers):
        super().compile()
        self.optimizers = optimizers

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((part(data[0]) - keras.ops.sum(data[0], 1, keepdims=True)) ** 2)
            optimizer.apply(tape.gradient(loss, part.trainable_weights), part.trainable_weights)
            self.tracker.update_state(loss)
        return {"both": self.tracker.result()}


class WithCompiledMetrics(WithoutCall):
    compile = keras.Model.compile
    metrics = keras.Model.metrics


def case_a_model_without_call():
    with scope():
        model = WithoutCall()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.05))
    history = model.fit(X, Y, batch_size=16, epochs=5, verbose=0).history["both"]
    assert history[-1] < history[0] / 2, history
    assert [int(each.iterations) for each in model.optimizers] == [5 * BATCHES] * 2
    with scope():
        for make in (WithCompiledMetrics, keras.Model):
            model = make()
            model.compile("sgd", metrics=["accuracy"])
            with pytest.raises(RuntimeError, match="Unable to automatically build"):
                model.fit(X, Y, verbose=0)


class Perplexity(keras.Sequential):
    def get_metrics_result(self):
        result = super().get_metrics_result()
        return {**result, "perplexity": keras.ops.exp(result["loss"])}


class OfResults(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "error": 1.0 - self.metrics[-1].result()["accuracy"], "rows": tf.shape(data[0])[0]}


def case_logs_that_are_computed_from_results():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope():
        model = Perplexity([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", loss)
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, validation_data=(X[:50], Y[:50])).history
        for prefix in ("", "val_"):
            np.testing.assert_allclose(history[f"{prefix}perplexity"], np.exp(history[f"{prefix}loss"]), rtol=1e-5)
        with logged() as told:
            model = OfResults()
            model.compile("sgd", loss, metrics=["accuracy"])
            model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    lines = [line for line in told if "of the last batch only" in line]
    assert [line.partition(",")[0] for line in lines] == ["logs: error"], told


def case_a_loop_of_ones_own_is_refused():
    with scope() as strategy:
        total = tf.Variable(0.0)
        data = tf.data.Dataset.range(3).batch(1)
        with pytest.raises(ScopeError, match=r"runs on the chief alone. Received: strategy.run"):
            strategy.run(lambda batch: total.assign_add(1.0), args=(next(iter(data)),))
        assert float(total) == 0.0
        with pytest.raises(ScopeError, match=r"runs on the chief alone. Received: strategy.run"):
            tf.function(lambda: strategy.run(lambda: total.assign_add(1.0)))()
        scheduled = strategy.coordinator.schedule(tf.function(lambda: strategy.run(lambda: total.read_value() + 1.0)))
        assert float(strategy.coordinator.fetch(scheduled)) == 1.0


def case_a_model_is_trained_after_its_scope():
    with scope():
        model = classifier()
    model.fit(X, Y, batch_size=16, verbose=0)
    assert iterations(model) == BATCHES


def case_optimizers():
    def parts():
        each = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(lambda variable: each["bias" in variable.path])

    optimizers = {
        "several": parts,
        "ema": lambda: keras.optimizers.AdamW(0.01, use_ema=True),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0),
    }
    for name, make in optimizers.items():
        with scope():
            model = classifier(make())
            before = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
            model.fit(X, Y, batch_size=16, epochs=5, verbose=0)
            # `iterations` counts full accumulations, `_iterations` all.
            inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
            for each in (inner, *getattr(inner, "optimizers", ())):
                assert int(each._iterations) == 5 * BATCHES, name
            assert model.evaluate(X, Y, verbose=0, return_dict=True)["loss"] < before, name


def case_steps_that_are_counted_together_need_one_worker():
    with scope():
        model = classifier(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
        if session_of(model).dispatcher.num_workers > 1:
            with pytest.raises(ScopeError, match=r"gradient_accumulation_steps=3, and \d workers"):
                model.fit(X, Y, batch_size=16, verbose=0)
        else:
            model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
            assert int(model.optimizer._iterations) == 2 * BATCHES


def case_a_function_is_made_for_a_kind_of_input():
    """Not for a number of rows; and what is named is not what comes in this order."""
    with scope():
        first, second = keras.Input((2,), name="b"), keras.Input((2,), name="a")
        model = keras.Model([first, second], first - 10.0 * second)
        x, y = np.ones((40, 2), "float32"), np.full((40, 2), 2.0, "float32")
        for rows in (40, 30, 17):
            np.testing.assert_array_equal(model.predict([x[:rows], y[:rows]], verbose=0), np.full((rows, 2), -19.0))
        assert len(session_of(model).functions.traced) == 1
        named = model.predict({"b": x, "a": y}, verbose=0)
        np.testing.assert_array_equal(named, np.full((40, 2), -19.0))


class Descent(keras.Model):
    """One weight, whose gradient is 1; a step takes as long as its row says, between reading and applying."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros")
        self.built = True
        self.compile(keras.optimizers.SGD(1.0))

    def call(self, inputs):
        return inputs * self.weight

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.identity(self.weight.value)
        [gradient] = tape.gradient(loss, [self.weight.value])
        rounds = tf.cast(tf.reduce_max(data), tf.int32)
        _, slow = tf.while_loop(
            lambda i, _: i < rounds, lambda i, m: (i + 1, tf.matmul(m, m) * 1e-3), (0, tf.ones((200, 200)))
        )
        self.optimizer.apply([gradient + 0.0 * slow[0, 0]], [self.weight])
        return {"loss": loss}


def histogram(messages):
    """Returns the numbers of updates by their staleness, as the log tells them."""
    [told] = [message for message in messages if "updates by their staleness" in message]
    return {int(staleness): int(count) for staleness, count in re.findall(r"(\d+) \((\d+) times\)", told)}


def case_staleness_is_what_the_options_say():
    """One slow step: the other worker makes many updates meanwhile."""
    rows = np.zeros((60, 1), "float32")
    rows[10] = 2000.0
    for options, part in [
        ({"staleness": "ignore"}, lambda stale: 1.0),
        ({"staleness": "scale"}, lambda stale: 1.0 / max(stale, 1)),
        ({"staleness": "drop", "bound": 2}, lambda stale: float(stale <= 2)),
    ]:
        with logged() as told, scope(**options):
            model = Descent()
            history = model.fit(rows, batch_size=1, shuffle=False, verbose=0).history
        counts = histogram(told)
        assert sum(counts.values()) == 60, counts
        assert max(counts) > 4, counts
        logs = {name: values for name, values in history.items() if name.startswith("staleness")}
        assert logs == {name: [value] for name, value in staleness_logs(counts, 2).items()}, (logs, counts)
        expected = sum(part(stale) * n for stale, n in counts.items())
        np.testing.assert_allclose(-model.weight.numpy(), expected, rtol=1e-5, err_msg=f"{options} {counts}")
        assert iterations(model) == (expected if options["staleness"] == "drop" else 60)


def case_the_first_steps_are_made_one_at_a_time():
    with scope(warmup_steps=1000):
        model = classifier()
        history = model.fit(X, Y, batch_size=16, epochs=4, verbose=0).history
        assert history["loss"][-1] < history["loss"][0]
        assert iterations(model) == 4 * BATCHES
        assert history["staleness_max"] == [0.0] * 4


def case_the_first_steps_are_those_of_the_first_epochs():
    with scope(warmup_steps=33):
        model = wide()
        history = model.fit(np.tile(X, (4, 1)), np.tile(Y, 4), batch_size=16, epochs=2, verbose=0).history
        assert iterations(model) == 2 * 33
        assert history["staleness_max"][0] == 0 < history["staleness_max"][1], history


def wide():
    """Returns a model whose steps take long."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1500), keras.layers.Dense(1500)])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    return model


def case_two_workers_make_updates_stale():
    with scope():
        model = wide()
        history = model.fit(np.tile(X, (4, 1)), np.tile(Y, 4), batch_size=16, verbose=0).history
        assert iterations(model) == 33
        assert 0 < history["staleness_mean"][0] <= history["staleness_max"][0], history


def case_what_is_in_flight_is_saved_before_the_job_leaves():
    folder = tempfile.mkdtemp()
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: os.kill(os.getpid(), signal.SIGUSR1) if batch == 4 else None
    )
    with scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1500), keras.layers.Dense(1500)])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        backup = kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        with pytest.raises(SystemExit):
            model.fit(X, Y, batch_size=16, verbose=0, callbacks=[tell, backup, kdist.callbacks.Preemption()])
    saved = CheckpointDirectory(folder).read()[1]
    numbers = [np.asarray(each).tolist() for each in saved["model"].values() if getattr(each, "dtype", None) == "int64"]
    assert saved["data"]["epoch step"] == 5
    assert 5 in numbers, numbers


def case_the_rest_of_an_epoch_adds_to_its_beginning():
    folder = tempfile.mkdtemp()
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: os.kill(os.getpid(), signal.SIGUSR1) if batch == 4 else None
    )
    batches, seen = [], []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(batch),
        on_epoch_end=lambda epoch, logs: seen.append((logs["count"], logs["squares"])),
    )

    def fit(*callbacks):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[SeenOnce()])
        backup = kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        given = [*callbacks, backup, kdist.callbacks.Preemption()]
        model.fit(IDS, IDS, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=given)
        return model

    with scope():
        with pytest.raises(SystemExit):
            fit(tell)
        assert iterations(fit(note)) == 2 * BATCHES
    assert len(batches) <= 2 * BATCHES
    assert seen == [(130.0, float(np.sum(IDS**2)))] * 2, seen


def case_refusals():
    outside = classifier()
    rate = keras.optimizers.SGD(0.1)
    backup = kdist.callbacks.BackupAndRestore("nowhere", save_freq=5)
    theirs = keras.callbacks.BackupAndRestore("nowhere", save_freq=7)
    with scope():
        with pytest.raises(ScopeError, match="save_freq=5"):
            classifier().fit(X, Y, verbose=0, callbacks=[backup])
        for act, said in [
            (lambda: outside.fit(X, Y, verbose=0), "made outside of kdist.scope"),
            (lambda: classifier().fit(X, Y, verbose=0, callbacks=[theirs]), "save_freq=7"),
            (lambda: classifier(rate).fit(X, Y, verbose=0), "made outside of kdist.scope"),
            (lambda: classifier(run_eagerly=True).fit(X, Y, verbose=0), "run_eagerly"),
        ]:
            with pytest.raises(ScopeError, match=said):
                act()


def case_ignored_settings_are_named():
    for settings, named in [({}, []), ({"auto_shard": False, "stall_timeout": 30.0}, ["auto_shard, stall_timeout"])]:
        with logged() as told, kdist.scope(kdist.ParameterServer(timeout=120), **settings):
            pass
        about = [message for message in told if "ignores" in message]
        assert about == [f"parameter-server training ignores {names}: see kdist.ParameterServer" for names in named]


def case_another_number_of_ps_than_the_clusters_is_refused():
    with pytest.raises(StrategyError, match="num_ps=7, and a cluster with 1 ps"):
        kdist.scope(kdist.ParameterServer(num_ps=7)).__enter__()


def case_theirs_are_refused():
    """Keras 3 does not train under TensorFlow's own strategy, and partitions no variable."""
    with scope() as strategy:
        pass
    for partitioner, said in [
        (None, "fit fails at the first step. Received: a ParameterServerStrategy"),
        (tf.distribute.experimental.partitioners.FixedShardsPartitioner(2), "whole on one ps"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("KDIST_STRATEGY")
            patch.setattr(strategy.extended, "_variable_partitioner", partitioner)
            with pytest.raises(StrategyError, match=said):
                kdist.scope(strategy).__enter__()


def case_an_error_in_a_step_is_the_users():
    wrong = Y.copy()
    wrong[70] = 99
    with scope():
        model = classifier()
        with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99"):
            model.fit(X, wrong, batch_size=16, verbose=0)
        model = classifier()
        model.fit(X, Y, batch_size=16, verbose=0)
        assert iterations(model) == BATCHES


# On one worker: what plain Keras does.


def alone_weights_equal_plain_keras():
    def make(**kwargs):
        return classifier(keras.optimizers.Adam(0.01, global_clipnorm=1.0), **kwargs)

    kwargs = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0, "validation_data": (X, Y)}
    for steps in (1, 4):
        with scope():
            model = make(steps_per_execution=steps)
            ours = model.fit(X, Y, **kwargs).history
        plain = make(steps_per_execution=steps)
        same(without_staleness(ours), plain.fit(X, Y, **kwargs).history, rtol=1e-4)
        for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
        assert iterations(model) == iterations(plain) == 3 * BATCHES
        assert ours["staleness_max"] == [0.0] * 3
        assert ours["staleness_0"] == [float(BATCHES)] * 3


def main(directory, cases):
    report = Path(directory, "report.jsonl")
    for name in cases:
        keras.backend.clear_session()
        try:
            value = globals()[name]()
            error = None
        except Exception:
            value, error = None, traceback.format_exc()
        with report.open("a") as file:
            file.write(json.dumps({"case": name, "error": error, "value": value}) + "\n")


if __name__ == "__main__":
    # Every task enters a scope; only the chief goes on.
    with scope():
        pass
    main(sys.argv[1], sys.argv[2:])
