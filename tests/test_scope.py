"""`kdist.scope`: what it refuses, what it leaves unchanged in one process, and what it leaves behind."""

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer

import kdist
from kdist import _arguments
from kdist._arguments import with_environment
from kdist.errors import ScopeError, StrategyError
from kdist.strategies.devices import threads_per_rank
from tests.helpers import spmd
from tests.helpers.jobs import job

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
STEPS = ("train_step", "test_step", "predict_step", "make_train_function", "compile", "_maybe_symbolic_build")


def refused(error, **settings):
    """Returns the message of the error that a scope raises."""
    with pytest.raises(error) as caught:
        with kdist.scope(**settings):
            raise AssertionError("the scope was opened")
    message = str(caught.value)
    for word in ("Received: ", "Expected ", "Fix: "):
        assert word in message
    return message


# What it refuses.


@pytest.mark.parametrize("word", ["majic", "Mirrored", ""])
def test_an_unknown_strategy_lists_the_known_ones(word):
    message = refused(StrategyError, strategy=word)
    assert f"strategy={word!r}" in message
    for known in ("'auto'", "'single'", "'mpi'", "kdist.AllReduce", "tf.distribute.Strategy"):
        assert known in message


def test_an_object_of_another_type_is_refused():
    assert "of type int" in refused(StrategyError, strategy=4)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (kdist.AllReduce, {"engine": "smoke"}),
        (kdist.ParameterServer, {"staleness": "halve"}),
        (kdist.ParameterServer, {"staleness": "drop"}),
        (kdist.ParameterServer, {"bound": 3}),
        (kdist.ParameterServer, {"staleness": "drop", "bound": -1}),
        (kdist.ParameterServer, {"num_ps": 0}),
    ],
)
def test_invalid_options_are_refused_where_they_are_written(strategy, options):
    with pytest.raises(StrategyError) as caught:
        strategy(**options)
    name, value = list(options.items())[-1]
    for word in (f"{name}={value!r}", "Received: ", "Expected ", "Fix: "):
        assert word in str(caught.value)
    assert f"kdist.{strategy.__name__}(...)" in str(caught.value)


@pytest.mark.parametrize("settings", [{"scale_lr": "cubic"}, {"scale_lr": -1}, {"warmup_epochs": -1}])
def test_an_invalid_setting_is_refused_where_it_is_written(settings):
    ((name, value),) = settings.items()
    with pytest.raises(StrategyError, match=f"`{name}` is invalid. Received: {name}={value!r}"):
        kdist.scope(**settings)


def test_an_unknown_strategy_is_refused_where_it_is_written():
    with pytest.raises(StrategyError, match="write 'mirrored', if that was meant"):
        kdist.scope("mirored")


@pytest.mark.parametrize(
    ("variable", "text", "settings"),
    [
        ("KDIST_STRATEGY", "single", {"strategy": "mpi"}),
        ("KDIST_STRATEGY", "single", {"strategy": kdist.AllReduce()}),
        ("KDIST_SCALE_BATCH", "1", {"scale_batch": False}),
        ("KDIST_SCALE_LR", "sqrt", {"scale_lr": "linear"}),
        ("KDIST_SCALE_LR", "none", {"scale_lr": 2.0}),
        ("KDIST_WARMUP_EPOCHS", "3", {"warmup_epochs": 2}),
        ("KDIST_AUTO_SHARD", "true", {"auto_shard": False}),
    ],
)
def test_an_environment_that_contradicts_the_code_is_refused_and_both_are_named(variable, text, settings, monkeypatch):
    monkeypatch.setenv(variable, text)
    ((name, value),) = settings.items()
    message = refused(ScopeError, **settings)
    assert f"{variable}={text!r}" in message
    assert f"kdist.scope({name}={value!r})" in message


@pytest.mark.parametrize(
    ("variable", "text", "settings", "chosen"),
    [
        ("KDIST_STRATEGY", "single", {}, "single"),
        ("KDIST_STRATEGY", "single", {"strategy": "single"}, "single"),
        ("KDIST_STRATEGY", "auto", {"strategy": "single"}, "single"),
        ("KDIST_SCALE_LR", "none", {}, None),
        ("KDIST_SCALE_LR", "none", {"scale_lr": None}, None),
        ("KDIST_SCALE_LR", "2", {}, 2),
        ("KDIST_SCALE_LR", "2", {"scale_lr": 2}, 2),
        ("KDIST_SCALE_BATCH", "False", {}, False),
        ("KDIST_SCALE_BATCH", "False", {"scale_batch": False}, False),
    ],
)
def test_the_environment_may_repeat_the_code_or_replace_a_default(variable, text, settings, chosen, monkeypatch):
    monkeypatch.setenv(variable, text)
    used, check = [], _arguments.check
    monkeypatch.setattr(_arguments, "check", lambda settings, env: (used.append(settings), check(settings, env)))
    with kdist.scope(**settings):
        pass
    assert used[0][variable.removeprefix("KDIST_").lower()] == chosen


def test_the_environment_may_choose_the_engine_of_options():
    chosen = with_environment({"strategy": kdist.AllReduce(start_timeout=9)}, {"KDIST_STRATEGY": "mpi"})
    assert chosen["strategy"] == kdist.AllReduce("mpi", start_timeout=9)


@pytest.mark.parametrize(
    ("variable", "text"), [("KDIST_SCALE_BATCH", "maybe"), ("KDIST_STRATEGY", "majic"), ("KDIST_SCALE_LR", "cubic")]
)
def test_an_invalid_variable_is_refused(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(StrategyError, match=text):
        kdist.scope().__enter__()


def test_a_nested_scope_is_refused_and_the_outer_one_stays_open():
    with kdist.scope():
        assert "open already" in refused(ScopeError)
        assert "open already" in refused(ScopeError)
    with kdist.scope():
        pass


def test_an_error_closes_the_scope():
    with pytest.raises(ZeroDivisionError):
        with kdist.scope():
            raise ZeroDivisionError
    with kdist.scope():
        pass


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_backend_other_than_tensorflow_is_refused(backend):
    code = "import keras, kdist\nwith kdist.scope(): print('opened')"
    env = {**(spmd.LEAN if backend == "tensorflow" else spmd.EVERY_PACKAGE), "KERAS_BACKEND": backend}
    done = spmd.execute([sys.executable, "-c", code], env=env, timeout=120)
    message = f"ScopeError: kdist needs Keras' TensorFlow backend. Received: the backend '{backend}'"
    if backend == "tensorflow":
        assert done.output.strip().endswith("opened")
    else:
        assert done.returncode == 1, done.output
        assert "opened" not in done.output
        assert message in done.output


# What it leaves alone in one process.


def trained():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return model


@pytest.mark.parametrize("settings", [{}, {"strategy": "single"}, {"scale_batch": False, "scale_lr": None}])
def test_in_one_process_everything_is_keras_own(settings):
    keras_own = {name: getattr(keras.Model, name) for name in (*METHODS, *STEPS, "__init__")}
    iterator = tensorflow_trainer.TFEpochIterator
    plain = trained()
    with kdist.scope(**settings) as strategy:
        assert strategy is tf.distribute.get_strategy()
        assert not tf.distribute.has_strategy()
        model = trained()
        assert {name: getattr(keras.Model, name) for name in keras_own} == keras_own
        assert tensorflow_trainer.TFEpochIterator is iterator
    assert model.__dict__.keys() == plain.__dict__.keys()
    assert model.optimizer.__dict__.keys() == plain.optimizer.__dict__.keys()
    for name in (*METHODS, *STEPS):
        assert getattr(model, name).__func__ is getattr(plain, name).__func__
    assert model.train_function.__code__ is plain.train_function.__code__
    assert model.distribute_strategy is plain.distribute_strategy


@pytest.mark.parametrize(
    "strategy", ["auto", kdist.AllReduce(shard="optimizer", shard_embeddings=1.0)], ids=["whole", "in parts"]
)
def test_micro_batches_in_one_process(strategy):
    """A step takes as many batches as on several ranks, and the rate is scaled for them. All state is whole."""
    x = np.random.default_rng(0).normal(size=(44, 2)).astype("float32")
    y = x[:, :1] - x[:, 1:]
    steps = []
    with kdist.scope(strategy, micro_batches=4, warmup_epochs=0):
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
        callbacks = [seen, kdist.callbacks.NaNPolicy()]
        history = model.fit(x, y, batch_size=5, shuffle=False, verbose=0, epochs=2, callbacks=callbacks)
        assert [float(np.sum(each)) for each in model.optimizer.variables]
        table = keras.layers.Embedding(3, 2)
        table.build(())
        assert keras.ops.sum(table.embeddings * 0) == 0
        found = model.evaluate(x, y, batch_size=5, verbose=0)
    plain = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    plain.compile(keras.optimizers.SGD(0.04), "mse")
    expected = plain.fit(x, y, batch_size=20, shuffle=False, verbose=0, epochs=2)
    assert steps == [0, 1, 2] * 2
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-5)
    np.testing.assert_allclose(found, plain.evaluate(x, y, verbose=0), rtol=1e-5)


def test_micro_batches_under_another_strategy_are_refused():
    own = tf.distribute.OneDeviceStrategy("/cpu:0")
    with (
        pytest.raises(StrategyError, match="Received: micro_batches=4 with OneDeviceStrategy"),
        kdist.scope(own, micro_batches=4),
    ):
        pass


def test_a_strategy_of_the_user_is_used_unchanged():
    own = tf.distribute.OneDeviceStrategy("/cpu:0")
    with kdist.scope(own) as strategy:
        assert strategy is own
        assert tf.distribute.get_strategy() is own
        keras.utils.clear_session()  # leaves the scope open
        assert keras.Sequential([keras.layers.Dense(1)]).distribute_strategy is own
    assert tf.distribute.get_strategy() is not own


# Two ranks.


CASES = "tests.scope_cases,tests.testing_cases,tests.keras_hooks.patch_cases"  # faults that do not end a job, too


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(CASES, 2, only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(CASES))
def test_on_two_ranks(launched, case):
    first, other = launched.values(case)
    assert first == other


THREADS = """
import os
for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.pop(name, None)
import kdist, tensorflow as tf
with kdist.scope():
    # In one write: both ranks have the same stream.
    os.write(1, f"threads {tf.config.threading.get_intra_op_parallelism_threads()}\\n".encode())
"""


@pytest.mark.parametrize("engine", ["mpi", "collective"])
def test_devices_are_configured_before_tensorflow_starts(engine, tmp_path):
    """Its thread pools and GPUs cannot be set later: the first message between ranks initialises it."""
    (script := tmp_path / "script.py").write_text(THREADS)
    done = job(engine, 2).launch([str(script)], timeout=90)
    assert done.returncode == 0, done.output
    threads = threads_per_rank(len(os.sched_getaffinity(0)), os.cpu_count(), 2)
    assert done.output.count(f"threads {threads}\n") == 2, done.output
    assert "TensorFlow was used before" not in done.output
