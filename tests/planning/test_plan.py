"""`kdist.plan` counts exactly; `kdist plan` runs a script up to its first `fit`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import kdist
from kdist.cli import main as cli
from kdist.errors import KDistError
from kdist.keras_hooks.optimizers import innermost
from kdist.planning import activations
from kdist.planning.first_call import FirstCall, inputs_of, run_step, stops_at_first_call
from kdist.planning.gathers import traced_gathers
from kdist.planning.rows import copied_bytes, held_bytes
from kdist.planning.weights import model_sizes, slots, unallocated
from tests.helpers import spmd

SCRIPT = """
import keras, numpy as np, kdist

with kdist.scope():
    model = keras.Sequential([keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.zeros((64, 600), "float32"), np.zeros((64, 1), "float32"), batch_size=16)
print("TRAINED")
"""
WEIGHTS = 4 * (600 * 512 + 512 + 512 + 1)


def model_of(optimizer):
    model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(("optimizer", "times"), [("adam", 2), ("sgd", 0), ("adagrad", 1)])
def test_weights_and_slots_are_exact_and_the_optimizer_is_left_alone(optimizer, times):
    model = model_of(optimizer)
    sizes = kdist.plan(model, batch_size=8, ranks=2).sizes
    assert sizes.weights == sizes.trained == WEIGHTS
    assert 0 <= sizes.slots - times * WEIGHTS <= 32  # the learning rate and the iterations
    assert sizes.row >= 4 * 513
    assert not model.optimizer.built


def test_large_weights_are_not_allocated():
    with unallocated():
        layer = keras.layers.Dense(10**6)
        layer.build((None, 10**6))  # 4 TB
    assert tuple(layer.kernel.shape) == (10**6, 10**6)


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(KDistError, match=r"model\.compile"):
        kdist.plan(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), batch_size=8, ranks=2)


def test_what_is_no_model_is_refused():
    with pytest.raises(KDistError, match=r"Received: 'm'\. Expected a keras\.Model"):
        kdist.plan("m", batch_size=8, ranks=2)


def test_a_model_without_inputs_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(KDistError, match="kdist plan -np N SCRIPT"):
        kdist.plan(model, batch_size=8, ranks=2)


@pytest.mark.parametrize("most_rows", [1, 2, 3, 64])
@pytest.mark.parametrize("row", [0, 1_000_000, 40_000_000])
def test_rows_are_counted_once(monkeypatch, most_rows, row):
    """A step's peak is what the process holds, and so much for each row, of the first two, too."""
    ran = []
    monkeypatch.setattr(activations, "status", lambda name: 500_000_000 + row * ran[-1])
    assert activations.measure(ran.append, most_rows) == (500_000_000, row)
    assert max(ran) <= max(4, most_rows)


def first_call(run):
    with pytest.raises(FirstCall) as caught, stops_at_first_call(), kdist.scope():
        run()
    return caught.value


def fit_strings():
    words = tf.constant(["a b", "b c", "c d e"])
    vectorization = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorization.adapt(words)
    layers = [
        vectorization,
        keras.layers.Embedding(20, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((), dtype="string"), *layers])
    model.compile("adam", "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((words, np.zeros((3, 1)))).batch(3))


def fit_ragged():
    class Means(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(tf.reduce_mean(x, axis=1)[:, tf.newaxis])

    model = Means()
    model.compile("adam", "mse")
    model.fit(tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]]), np.zeros((3, 1)))))


def fit_sparse():
    model = keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(tf.data.Dataset.from_tensors((tf.sparse.from_dense(np.eye(3, 5, dtype="float32")), np.zeros((3, 1)))))


def fit_without_targets():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            found = self.dense(x)
            self.add_loss(keras.ops.mean(found**2))
            return found

    class Weighted(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.ones((3, 2), "float32"), None, np.ones(3)

    model = Own()
    model.compile("adam")
    model.fit(Weighted())


def fit_loader():
    class Loader:  # as that of torch, or of Grain: it yields lists of what has a shape
        def __iter__(self):
            yield [np.ones((3, 2), "float32"), np.ones((3, 1))]

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(Loader())


def fit_eagerly():
    class Own(keras.layers.Layer):
        def call(self, x):
            return x * np.float32(len(x.numpy()))

        def compute_output_shape(self, shape):
            return shape

    model = keras.Sequential([keras.Input((2,)), Own(), keras.layers.Dense(1)])
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(np.ones((3, 2), "float32"), np.ones((3, 1)))


@pytest.mark.parametrize("fit", [fit_strings, fit_ragged, fit_sparse, fit_without_targets, fit_loader, fit_eagerly])
def test_data_of_all_kinds_is_taken(fit):
    call = first_call(fit)
    sizes = model_sizes(call.model, call.batch_size, inputs_of(call))
    assert call.batch_size == 3
    assert sizes.trained > 0
    for rows in (1, 2, 5):  # more than the batch has
        run_step(call, rows)


def test_an_uncompiled_model_predicts():
    model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(512)])
    call = first_call(lambda: model.predict(np.zeros((64, 600), "float32"), batch_size=16))
    sizes = model_sizes(call.model, call.batch_size, inputs_of(call), is_trained=False)
    assert (sizes.weights, sizes.trained, sizes.slots) == (4 * (600 * 512 + 512), 0, 0)
    assert sizes.row >= 4 * 512
    run_step(call, 3)


def test_what_a_script_predicts_before_it_trains_is_zeros():
    """Of the shapes that it would have; also of weights without values, in data of any kind and length."""
    x, y = np.ones((70, 600), "float32"), np.ones((70, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def run():
        model = keras.Sequential([keras.layers.Dense(4096), keras.layers.Dense(2)])
        assert model.predict(x[:1], verbose=0).shape == (1, 2)
        model.compile("adam", "mse", metrics=["mae"])
        for given in (x, data):
            np.testing.assert_array_equal(model.predict(given, verbose=0), np.zeros((70, 2)))
        assert model.predict_on_batch(x[:3]).shape == (3, 2)
        assert model.evaluate(data, verbose=0, return_dict=True) == {"loss": 0.0, "mae": 0.0}
        assert model.test_on_batch(x, y) == [0.0, 0.0]
        batches = ((x[start : start + 32],) for start in range(0, 70, 32))
        assert model.predict(batches, verbose=0).shape == (70, 2)
        model.fit(x, y, batch_size=8)

    with unallocated():
        call = first_call(run)
    assert (call.method, call.batch_size) == ("fit", 8)
    assert model_sizes(call.model, call.batch_size, inputs_of(call)).trained == 4 * (601 * 4096 + 4097 * 2)
    call = first_call(run)
    run_step(call, 3)


def test_models_outside_of_the_scope_predict_zeros_and_the_training_in_it_is_planned():
    x = np.ones((70, 600), "float32")

    def used_outside(method="predict", *targets):
        outside = keras.Sequential([keras.layers.Dense(4096), keras.layers.Dense(3)])
        outside.compile("sgd", "mse")
        return outside, getattr(outside, method)(x, *targets, verbose=0)

    def run():
        features = used_outside()[1]
        np.testing.assert_array_equal(features, np.zeros((70, 3)))
        with kdist.scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile("adam", "mse")
            model.fit(features, np.ones((70, 2)), batch_size=8)

    def adopt():
        outside, _ = used_outside()
        with kdist.scope():
            outside.predict(x, verbose=0)

    with unallocated(), pytest.raises(FirstCall) as caught, stops_at_first_call():
        run()
    assert (caught.value.method, caught.value.batch_size) == ("fit", 8)
    assert model_sizes(caught.value.model, 8, inputs_of(caught.value)).trained == 4 * (3 * 2 + 2)
    with pytest.raises(FirstCall), stops_at_first_call():
        adopt()
    for method, *targets in (("predict",), ("evaluate", x[:, :3]), ("fit", x[:, :3])):
        with pytest.raises(KDistError, match=rf"{method} was called outside of kdist\.scope"), stops_at_first_call():
            used_outside(method, *targets)


class TwoOptimizers(keras.Model):
    """Two layers, each with an optimizer of its own, as of a GAN; that of `compile` is never used."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(100), keras.layers.Dense(50)

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def call(self, x):
        return self.other(self.one(x))

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(self(data[0]) ** 2)
        for optimizer, layer in ((self.first, self.one), (self.second, self.other)):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


def test_optimizers_of_a_models_own_are_counted():
    def fit():
        model = TwoOptimizers()
        model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
        model.fit(np.ones((8, 30), "float32"), np.ones((8, 50), "float32"))

    call = first_call(fit)
    one, other = 4 * 31 * 100, 4 * 101 * 50
    sizes = model_sizes(call.model, 8, inputs_of(call))
    assert 0 <= sizes.slots - 2 * (one + other) <= 64  # the larger ones, until it is known who updates what
    run_step(call, 2)
    assert 0 <= slots(call.model) - (2 * one + other) <= 64


class WithoutCall(keras.Model):
    """As the GANs of Keras' examples: a step of its own that takes the inputs alone."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((30,)), keras.layers.Dense(100)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.inner(x) ** 2) / tf.cast(tf.shape(x)[0], "float32")
        self.optimizer.apply(tape.gradient(loss, self.inner.trainable_variables), self.inner.trainable_variables)
        return {"loss": loss}


def test_a_model_without_call_is_planned():
    def fit():
        model = WithoutCall()
        model.compile("adam")
        model.fit(np.ones((8, 30), "float32"))

    call = first_call(fit)
    sizes = model_sizes(call.model, 8, inputs_of(call))
    assert (sizes.weights, sizes.row) == (4 * 31 * 100, 0)  # a row is measured
    run_step(call, 2)
    assert 0 <= slots(call.model) - 2 * sizes.weights <= 64


def test_frames_and_mapped_files_are_counted_by_what_they_hold(tmp_path):
    numbers = np.ones((64, 3))
    frame = pd.DataFrame(numbers)
    assert numbers.nbytes <= held_bytes(frame) <= numbers.nbytes + 200  # and its index
    assert copied_bytes(frame) == copied_bytes(numbers) == 64 * 3 * 4
    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=(64, 3))
    assert held_bytes(mapped) == held_bytes(mapped[2:]) == 0
    assert held_bytes(mapped + 1) == held_bytes(tf.ones((64, 3))) == 64 * 3 * 4
    assert held_bytes(tf.data.Dataset.range(3)) == 0


class ClipsByHand(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([tf.clip_by_value(each, -1, 1) for each in grads], trainable_variables)


def test_what_the_optimizer_or_the_layers_do_not_allow_is_not_planned():
    for refused in (False, True):
        plain, own = model_of("sgd"), model_of(ClipsByHand(0.1))
        if refused:
            plain.quantize("float8")
            plain.compile("sgd", "mse")
        strategies = [
            {each.strategy for each in kdist.plan(model, batch_size=8, ranks=2).shares} for model in (plain, own)
        ]
        assert ['shard="optimizer"' in each for each in strategies] == [not refused, False]


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """As in Keras' documentation: without a config."""

    def __call__(self, step):
        return 0.1 / (step + 1)


class FallingWithConfig(Falling):
    def get_config(self):
        return {}


class OwnAdam(keras.optimizers.Adam):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(Falling()),
        lambda: keras.optimizers.Adam(FallingWithConfig()),
        lambda: keras.optimizers.Adam(lambda: 0.1),
        lambda: keras.optimizers.LossScaleOptimizer(OwnAdam(Falling())),
    ],
    ids=["schedule", "schedule with a config", "function", "class within a loss scale"],
)
def test_slots_are_counted_whatever_the_learning_rate_and_the_class(make):
    optimizer = make()
    model = model_of(optimizer)
    rate = innermost(optimizer)._learning_rate
    assert 0 <= kdist.plan(model, batch_size=8, ranks=2).sizes.slots - 2 * WEIGHTS <= 64
    assert innermost(optimizer)._learning_rate is rate


class Momentum(keras.optimizers.SGD):
    """Without a config of its own."""

    def __init__(self, rate):
        super().__init__(rate, momentum=0.9)


def test_an_optimizer_of_which_no_copy_is_made_is_named():
    model = model_of(Momentum(0.1))
    with pytest.raises(KDistError, match=r"Received: Momentum, .*unexpected keyword.*Fix: .*optimizer\.build"):
        kdist.plan(model, batch_size=8, ranks=2)
    model.optimizer.build(model.trainable_variables)  # as the error says
    assert 0 <= kdist.plan(model, batch_size=8, ranks=2).sizes.slots - WEIGHTS <= 32


GATHERS = """
import keras, numpy as np, kdist

received = []

def own_loss(y_true, y_pred):  # of the rows of all ranks, as nothing is known of it
    received.extend([y_true, y_pred])
    return keras.ops.mean((y_true - y_pred) ** 2)

class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(512), keras.layers.Dense(300)

    def call(self, x):
        found = self.other(self.one(x))
        received.append(kdist.all_gather(found[:, :200]))
        return found

with kdist.scope():
    model = Contrastive()
    model.compile("adam", own_loss, run_eagerly=kdist.size() > 1)
    model.fit(np.zeros((128, 600), "float32"), np.zeros((128, 300), "float32"), batch_size=64)
    sizes = [int(keras.ops.size(each)) * each.dtype.size for each in received[-3:]]
    print("GATHERED", sum(sizes))  # of the step, not of what builds the model
"""


@pytest.mark.starts_processes
@pytest.mark.timeout(300)
def test_what_ranks_gather_is_planned(tmp_path):
    """For `kdist.all_gather` and for a loss that gets the rows of all: as many bytes as each of two ranks has got."""
    done = planned(tmp_path, GATHERS, "--json")
    assert done.returncode == 0, done.output
    found = json.loads(done.output[done.output.index("{") :])
    (whole, parts) = (each["ranks"][0] for each in found["strategies"])
    ran = spmd.launch([sys.executable, str(tmp_path / "train.py")], 2)
    assert ran.returncode == 0, ran.output
    gathered = int(re.findall(r"GATHERED (\d+)", ran.output)[0])
    assert gathered == 128 * 4 * (300 + 300 + 200)
    assert whole["messages"] - whole["gradients"] == parts["messages"] - whole["gradients"] == gathered


def test_what_ranks_gather_is_counted_of_models_that_are_not_run():
    def fit():
        class Gathering(keras.layers.Layer):
            def call(self, x):
                return x + keras.ops.mean(kdist.all_gather(x))

        model = keras.Sequential([keras.layers.Dense(8), Gathering()])
        model.compile("adam", lambda y_true, y_pred: keras.ops.mean(y_true - y_pred), metrics=["mse"])
        model.fit(np.ones((5, 3), "float32"), np.ones((5, 8), "float32"), sample_weight=np.ones(5))

    with unallocated():
        assert traced_gathers(first_call(fit)) == 4 * (8 + 8 + 8 + 1)


def planned(tmp_path, source, *options, env=None):
    """Runs `kdist plan` of a link to a script, beside which a module lies."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(source)
    (tmp_path / "project" / "neighbour.py").touch()
    (tmp_path / "train.py").symlink_to(tmp_path / "project" / "train.py")
    command = [sys.executable, "-m", "kdist", "plan", "-np", "2", *options, str(tmp_path / "train.py")]
    return spmd.execute(command, timeout=200, env=env)


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_that_does_not_fit_is_planned_and_not_trained(tmp_path):
    script = SCRIPT.replace("kdist.scope()", 'kdist.scope("mpi", micro_batches=3)')
    script = f"import neighbour, kdist\nassert kdist.size() == 1\n{script}"
    cluster = {"cluster": {"worker": ["a.invalid:1", "b.invalid:1"]}, "task": {"type": "worker", "index": 0}}
    done = planned(tmp_path, script, "--memory", "10MB", "--json", env={"TF_CONFIG": json.dumps(cluster)})
    assert done.returncode == 3, done.output
    assert "TRAINED" not in done.output
    found = json.loads(done.output[done.output.index("{") :])
    (whole, _) = (each["ranks"][0] for each in found["strategies"])
    assert whole["weights"] == WEIGHTS
    assert whole["data"] == 2 * 64 * 601 * 4  # the script's arrays, and the tensors that Keras makes of them
    assert (found["batch_size"], found["rows"]) == (16, 24)  # three batches on two ranks
    assert (found["activations"], found["verb"], found["is_training"]) == ("measured", "fit", True)
    assert all("Fix" not in each["advice"] and each["advice"] for each in found["strategies"])


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_that_only_predicts_is_planned_as_that(tmp_path):
    predicts = "assert model.predict(np.zeros((64, 600), 'float32')).shape == (64, 1); raise SystemExit"
    done = planned(tmp_path, SCRIPT.replace("model.fit(", f"{predicts}\n    model.fit("), "--memory", "10GB")
    assert done.returncode == 0, done.output
    assert "10.0 GB for each of predict: no training" in done.output


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_without_a_scope_is_told_what_to_do(tmp_path):
    done = planned(tmp_path, SCRIPT.replace("with kdist.scope():", "if True:"))
    assert done.returncode == 2, done.output
    assert "outside of kdist.scope()" in done.output
    assert "train.py:7" in done.output
    assert "TRAINED" not in done.output


@pytest.mark.starts_processes
@pytest.mark.timeout(220)
def test_a_script_that_fits_nothing_is_told_what_to_do(tmp_path):
    done = planned(tmp_path, "import kdist")
    assert done.returncode == 2, done.output
    assert "The script trained no model" in done.output


def test_tables_are_counted_and_proposed():
    layers = [keras.layers.Embedding(100_000, 32), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,), dtype="int64"), *layers])
    model.compile("adam", "mse")
    table = 4 * 100_000 * 32
    plan = kdist.plan(model, batch_size=8, ranks=4, memory=int(2.5 * table))
    assert plan.sizes.tables == table
    share = next(each for each in plan.shares if each.strategy == "shard_embeddings")
    rest = plan.sizes.weights - table
    assert share.weights == table // 4 + rest
    assert share.gradients == share.weights
    assert abs(share.slots - 2 * share.weights) <= 32
    assert plan.advice("all-reduce") == "shard_embeddings=1e6"
    both = next(each for each in plan.shares if each.strategy == "both in parts")
    assert both.weights == share.weights
    assert abs(both.gradients - plan.sizes.trained / 4) <= 1
    assert abs(both.slots - plan.sizes.slots / 4) <= 1
    assert both.messages == rest
    layers.append(keras.layers.Dense(100_000))
    wide = keras.Sequential([keras.Input((4,), dtype="int64"), *layers])
    wide.compile("adam", "mse")
    plan = kdist.plan(wide, batch_size=8, ranks=64, memory="10MB")
    for strategy in ("all-reduce", 'shard="optimizer"'):
        assert plan.advice(strategy) == 'shard="optimizer", shard_embeddings=1e6'
    model.compile(keras.optimizers.Lamb(), "mse")  # which needs whole tables
    assert "shard_embeddings" not in str(kdist.plan(model, batch_size=8, ranks=4))


@pytest.mark.starts_processes
@pytest.mark.timeout(100)
def test_a_script_that_takes_too_long_is_ended(tmp_path):
    done = planned(tmp_path, "import time; time.sleep(600)", "--timeout", "3")
    assert done.returncode == 2, done.output
    assert "took too long" in done.output
    assert "Fix: --timeout" in done.output


@pytest.mark.starts_processes
def test_a_plan_that_is_ended_leaves_nothing_behind(tmp_path):
    """In a signal's handler Python would not end the script, which runs in a session of its own."""
    script = tmp_path / "train.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-m", "kdist", "plan", "-np", "2", str(script)], env={**os.environ, **spmd.LEAN}
    )
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < limit
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--memory", "24XB", "train.py"], "24XB"), (["no_such.py"], "no_such.py"), ([], "No script given")],
)
def test_wrong_arguments_are_refused(arguments, words, capsys):
    assert cli.main(["plan", "-np", "2", *arguments]) == 2
    text = capsys.readouterr().err
    for word in [words, "Received", "Expected", "Fix: "]:
        assert word in text


def test_a_model_whose_activations_are_not_known_is_not_planned():
    embedding = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.GlobalMaxPooling1D()]
    static = [keras.Input(batch_shape=(3, 4, 2)), keras.layers.LSTM(2, stateful=True)]
    for layers, words in ((embedding, r"shape \(None, None\)"), (static, "two rows")):
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with pytest.raises(KDistError, match=f"(?s){words}.*kdist plan -np N SCRIPT"):
            kdist.plan(model, batch_size=3, ranks=2)
