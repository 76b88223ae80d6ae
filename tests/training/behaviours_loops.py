"""Training loops of the user's own: what the chief says of them, and what is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import MismatchError, NotSynchronizedError, StrategyError
from kdist.restarts.events import own_reports, read_events
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere, everyone, no_strategy_in_environment, weights_of
from tests.training.behaviours_refusals import refused
from tests.training.features.loops import WAYS, loop, share
from tests.training.fidelity import BATCH, fresh, mlp, rows, size


def said_of(batches: Any, wrap: Any) -> list[str]:
    """Returns what rank 0 says of a loop over batches; the others say nothing."""
    batches = list(batches)
    with logged() as said, kdist.scope():
        for _ in range(2):
            model, optimizer = mlp(), keras.optimizers.Adam(0.01)
            loop(model, optimizer, batches, wrap)
    said = [message for message in said if "loop" in message]
    assert len(said) == (1 if kdist.is_chief() else 0), said
    assert_equal_everywhere(weights_of(model))
    return everyone(said)[0]


def the_chief_says_that_ranks_saw_the_same_rows() -> None:
    x, y = rows("even")
    for wrap in WAYS.values():
        fresh()
        (said,) = said_of([(x, y), (x, y)], wrap)
        for words in ("averaged over", "were equal on all", "drop_remainder=True", "experimental_distribute_dataset"):
            assert words in said, said


def the_chief_says_that_ranks_saw_rows_of_their_own() -> None:
    x, y = rows("even")
    for wrap in WAYS.values():
        fresh()
        (said,) = said_of(share(x, y, BATCH), wrap)
        assert "averaged over" in said, said
        assert "rows of its own" in said, said


def rows_that_differ_in_an_embedding_alone() -> None:
    """Sparse gradients have no elements in common that could be compared."""
    tokens, y = np.arange(size() * 2 * BATCH)[:, None], np.ones((size() * 2 * BATCH, 1))

    def said(batches: Any) -> str:
        with logged() as messages, kdist.scope():
            model = keras.Sequential([keras.Input((1,), dtype="int64"), keras.layers.Embedding(len(tokens), 1)])
            loop(model, keras.optimizers.SGD(0.1), batches, tf.function)
        return everyone(" ".join(message for message in messages if "loop" in message))[0]

    fresh()
    assert "were equal on all" in said([(tokens, y[:, None])])
    with kdist.scope():
        pass
    assert "rows of its own" in said([(tokens, (1.0 + kdist.rank()) * y[:, None])])


def weights_that_differ_before_the_first_update() -> None:
    x, y = rows("even")
    for name, wrap in WAYS.items():
        fresh()
        with logged() as said, kdist.scope():
            model, optimizer = mlp(), keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
            if kdist.rank() == 1:
                model.set_weights([each + 1.0 for each in model.get_weights()])
            loop(model, optimizer, [(x, y)], wrap)
        assert_equal_everywhere(weights_of(model))
        told = [message for message in said if "began the training loop" in message]
        assert len(told) == (1 if kdist.is_chief() else 0), said
        assert all("[1]" in message for message in told)
        if name == "traced":  # the weights were made equal before the first step
            plain = mlp(), keras.optimizers.Adam(0.01)
            loop(*plain, [(x, y)], wrap)
            for one, other in zip(plain[0].weights, model.weights, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-9)


def models_that_differ_in_a_loop() -> None:
    fresh()
    x, y = rows("even")
    with kdist.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4 + kdist.rank()), keras.layers.Dense(2)])
        with refused(MismatchError, "variable 0", "[5, 4]", "[5, 5]"):
            loop(model, keras.optimizers.SGD(0.1), [(x, y)], WAYS["eagerly"])
        layers = [keras.layers.Dense(4) for _ in range(1 + kdist.rank())]
        deeper = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(2)])
        with refused(MismatchError, "first update of SGD"):
            loop(deeper, keras.optimizers.SGD(0.1), [(x, y)], WAYS["eagerly"])
        with pytest.raises(Exception, match="Ranks differ in the first update of SGD"):  # AutoGraph's, with the lines
            loop(model, keras.optimizers.SGD(0.1), [(x, y)], WAYS["traced"])


def the_scope_of_another_strategy() -> None:
    default = tf.distribute.get_strategy()
    mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
    for other in (default, mirrored, tf.distribute.OneDeviceStrategy("CPU:0")):
        with kdist.scope(), refused(StrategyError, type(other).__name__, "tf.distribute.get_strategy()"), other.scope():
            mlp()
    with kdist.scope():
        with tf.distribute.get_strategy().scope():
            mlp()
    assert keras.optimizers.Optimizer.apply.__module__.startswith("keras.")
    assert "apply" not in vars(keras.optimizers.SGD(0.1))
    with mirrored.scope():  # and after it, TensorFlow's own are as before
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])


def replicas_of(x: Any, y: Any) -> Any:
    """Returns a function of a model that makes an update in a replica of the strategy."""

    def replicas(model: keras.Model) -> None:
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        tf.distribute.get_strategy().run(step)

    return replicas


def options_that_are_of_fit_are_told_of() -> None:
    x, y = rows("even")

    for train in (lambda model: loop(model, keras.optimizers.SGD(0.1), [(x, y)], WAYS["traced"]), replicas_of(x, y)):
        fresh()
        with logged() as said, kdist.scope(kdist.AllReduce(compression="bf16", bucket_mb=4)):
            train(mlp())
        (told,) = [message for message in said if "no effect in a training loop" in message]
        assert "compression='bf16', bucket_mb=4" in told, told


def a_supervisor_learns_that_a_loop_has_begun_to_train() -> None:
    """`kdist run --restarts` starts a job again after an error only if it had trained."""
    x, y = rows("even")

    def loop_by_hand(model: keras.Model) -> None:
        loop(model, keras.optimizers.SGD(0.1), [(x, y)], WAYS["traced"])

    def on_batch(model: keras.Model) -> None:
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)

    for train in (loop_by_hand, replicas_of(x, y), on_batch):
        fresh()
        with tempfile.TemporaryDirectory() as directory, kdist.scope():
            model = mlp()
            own_reports.directory, own_reports.rank = Path(directory), kdist.rank()
            own_reports._has_made_step = False
            try:
                train(model)
            finally:
                own_reports.directory, own_reports.rank = None, 0
            assert read_events(directory).made_step == kdist.is_chief(), train


def an_update_that_is_not_wrapped() -> None:
    """A path that kdist does not know must not train each rank for itself."""
    fresh()
    with kdist.scope():
        variable = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([variable])
        with refused(NotSynchronizedError, "`apply`", keras.__version__):
            optimizer._backend_apply_gradients([tf.constant([1.0], tf.float64)], [variable])


def a_loop_in_one_process_is_keras_own() -> None:
    fresh()
    with no_strategy_in_environment(), kdist.scope("single"):
        optimizer = keras.optimizers.SGD(0.1)
        assert "apply" not in vars(optimizer)
        assert keras.optimizers.Optimizer.apply.__module__.startswith("keras.")


CASES = {
    function.__name__: function
    for function in (
        the_chief_says_that_ranks_saw_the_same_rows,
        the_chief_says_that_ranks_saw_rows_of_their_own,
        rows_that_differ_in_an_embedding_alone,
        weights_that_differ_before_the_first_update,
        models_that_differ_in_a_loop,
        the_scope_of_another_strategy,
        options_that_are_of_fit_are_told_of,
        a_supervisor_learns_that_a_loop_has_begun_to_train,
        an_update_that_is_not_wrapped,
        a_loop_in_one_process_is_keras_own,
    )
}
