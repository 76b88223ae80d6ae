"""What must not go on: every rank raises, before the first step or right after it, and says what to do."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import DataError, MismatchError, NotSynchronizedError, ScopeError, StrategyError
from tests.helpers.logs import logged
from tests.training.behaviours import assert_equal_everywhere, everyone, no_strategy_in_environment
from tests.training.fidelity import BATCH, mlp, rows


def refused(kind: type[Exception], *words: str) -> Any:
    """Expects the same error on all ranks, with what was received, expected, and how to fix it."""
    import contextlib

    @contextlib.contextmanager
    def checked() -> Any:
        with pytest.raises(kind) as raised:
            yield
        said = str(raised.value)
        for word in (*words, "Fix:"):
            assert word in said, (word, said)
        assert_equal_everywhere(type(raised.value).__name__)
        kdist.barrier()

    return checked()


def fit(model: keras.Model, **kwargs: Any) -> Any:
    x, y = rows("even")
    return model.fit(**{"x": x, "y": y, "batch_size": BATCH, "verbose": 0, **kwargs})


# Rule 10.


class ByHand(keras.Model):
    """Assigns weights from the rank's own gradients, by Python, which nothing shows to be computed from these."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, name="planted")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            step = tf.numpy_function(lambda value: 0.1 * value, [gradient], gradient.dtype)
            variable.assign(variable - tf.ensure_shape(step, variable.shape))
        return self.compute_metrics(x, y, None, None)


def an_update_without_a_reduction() -> None:
    for eagerly in (False, True):
        steps = []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, steps=steps: steps.append(batch))
        with kdist.scope():
            model = ByHand()
            model.compile("sgd", "mse", run_eagerly=eagerly)
            with refused(NotSynchronizedError, "planted", "rank(s) [", keras.__version__, tf.__version__):
                fit(model, callbacks=[count])
        assert steps in ([], [0]), "at the first step"


def an_update_without_a_reduction_on_batch() -> None:
    x, y = rows("even")
    with kdist.scope():
        model = ByHand()
        model.compile("sgd", "mse")
        with refused(NotSynchronizedError, "planted"):
            model.train_on_batch(x, y)


def an_optimizer_hidden_in_a_closure() -> None:
    hidden: list[keras.optimizers.Optimizer] = []

    class Hides(ByHand):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            hidden[0].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    for made_outside in (False, True):
        hidden[:] = [keras.optimizers.SGD(0.1)]
        with kdist.scope():
            if not made_outside:
                hidden[:] = [keras.optimizers.SGD(0.1)]
            model = Hides()
            model.compile("sgd", "mse")
            model(rows("even")[0])
            if made_outside:
                hidden[0].build(model.trainable_variables)
            if made_outside:  # TensorFlow itself refuses to mix strategies
                with pytest.raises(RuntimeError):
                    fit(model)
            else:
                with refused(NotSynchronizedError, "attribute of the model"):
                    fit(model)


# Ranks that disagree.


def models_of_other_widths() -> None:
    with kdist.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4 + kdist.rank()), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        with refused(MismatchError, "variable 0", "[5, 4]", "[5, 5]", "rank 1"):
            fit(model)
        with refused(MismatchError, "variable 0"):
            model.evaluate(*rows("even"), verbose=0)
        with refused(MismatchError, "variable 0"):
            model.predict(rows("even")[0], verbose=0)
        with refused(MismatchError, "variable 0"):
            model.train_on_batch(*rows("even"))


def models_of_other_depths() -> None:
    with kdist.scope():
        model = keras.Sequential(
            [keras.Input((5,)), *(keras.layers.Dense(2, name=f"d{i}") for i in range(1 + kdist.rank()))]
        )
        model.compile("sgd", "mse")
        with refused(MismatchError, "nothing"):
            fit(model)


def other_frozen_layers() -> None:
    with kdist.scope():
        model = mlp()
        model.layers[0].trainable = kdist.rank() == 0
        model.compile("sgd", "mse")
        with refused(MismatchError, "variable"):
            fit(model)


def other_optimizers() -> None:
    for make in (
        lambda rank: keras.optimizers.SGD(0.1) if rank else keras.optimizers.Adam(0.1),
        lambda rank: keras.optimizers.SGD(0.1 if rank else 0.2),
        lambda rank: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.9)),
        lambda rank: keras.optimizers.SGD(0.1, momentum=0.9 if rank else 0.8),
        lambda rank: keras.optimizers.SGD(0.1, clipnorm=1.0 if rank else None),
    ):
        with kdist.scope():
            model = mlp()
            model.compile(make(kdist.rank()), "mse")
            with refused(MismatchError, "optimizer", "rank 1"):
                fit(model)


def other_losses_and_metrics() -> None:
    for compiled in (
        {"loss": "mae" if kdist.rank() else "mse"},
        {"loss": keras.losses.MeanSquaredError(reduction="sum" if kdist.rank() else "mean")},
        {"loss": "mse", "metrics": ["mae"] if kdist.rank() else []},
        {"loss": "mse", "metrics": ["mae"] if kdist.rank() else ["mape"]},
        {"loss": "mse", "loss_weights": 1.0 + kdist.rank()},
        {"loss": "mse", "steps_per_execution": 1 + kdist.rank()},
        {"loss": "mse", "run_eagerly": bool(kdist.rank())},
    ):
        with kdist.scope():
            model = mlp()
            model.compile("sgd", **compiled)
            with refused(MismatchError, "rank 1"):
                fit(model)


def other_arguments_of_fit() -> None:
    rank = kdist.rank()
    x, y = rows("even")
    for arguments, word in (
        ({"epochs": 1 + rank}, "epochs"),
        ({"batch_size": 2 + rank}, "batch_size"),
        ({"shuffle": bool(rank)}, "shuffle"),
        (
            {"class_weight": {0: 1.0, 1: np.float64(1.0 + rank)}, "y": np.zeros(len(x), "int64")},
            "`train_test_split` without `random_state` before the scope, from which they were computed. Received: "
            "class_weight[1] is 1.0 on rank 0 and 2.0 on ",
        ),
        ({"class_weight": {0: 1.0} if rank else None, "y": np.zeros(len(x), "int64")}, "class_weight"),
        ({"validation_split": 0.1 + rank / 10}, "validation_split"),
        ({"initial_epoch": rank, "epochs": 3}, "initial_epoch"),
        ({"steps_per_epoch": 1 + rank}, "steps_per_epoch"),
        ({"validation_data": (x, y), "validation_freq": [1, 2 + rank]}, "validation_freq"),
        ({"validation_data": (x, y) if rank else None}, "validation_data"),
        ({"x": x[: len(x) - rank], "y": y[: len(y) - rank]}, "samples"),
        ({"x": x.astype("int64") if rank else x}, "signature"),
        ({"y": y[:, :1] if rank else y}, "signature"),
        ({"sample_weight": np.ones(len(x)) if rank else None}, "s"),
    ):
        with kdist.scope():
            model = mlp()
            model.compile("sgd", "mse")
            with refused(MismatchError, word, "rank 1"):
                fit(model, **arguments)


def other_kinds_of_data() -> None:
    x, y = rows("even")
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        with refused(MismatchError, "kind"):
            model.fit(dataset, verbose=0) if kdist.rank() else model.fit(x, y, verbose=0)
        with refused(MismatchError, "number of samples or batches"):
            model.fit(dataset.take(2 - kdist.rank() % 2), verbose=0)


def one_cache_for_the_ranks_of_a_host() -> None:
    x, y = rows("even")
    made = tempfile.mkdtemp() if kdist.is_chief() else None
    directory = Path(everyone(made)[0])

    def cached(name: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).cache(str(directory / name)).batch(BATCH)

    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with refused(DataError, "Ranks of one host would write one cache", str(directory / "of all")):
            model.fit(cached("of all"), verbose=0)
        model.fit(cached(f"of {kdist.rank()}"), verbose=0)
        model.fit(cached("of 0"), verbose=0)  # whole now, so read only
    kdist.barrier()
    if kdist.is_chief():
        shutil.rmtree(directory)


def shards_of_shards() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(rows("even"))
    of_each = dataset.shard(kdist.size(), kdist.rank()).batch(BATCH)
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with refused(DataError, *(f"shard({kdist.size()}, {rank}) on rank {rank}" for rank in (0, 1))):
            model.fit(of_each, verbose=0)
        model.fit(dataset.shard(2, 1).batch(BATCH), verbose=0)  # half of the data, for all
        assert int(model.optimizer.iterations) > 0
        strategy = tf.distribute.get_strategy()
        model.fit(
            strategy.distribute_datasets_from_function(
                lambda context: dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
            ),
            verbose=0,
        )
    with logged() as lines, kdist.scope(auto_shard=False):
        with refused(DataError, "make the model in a scope with auto_shard=False"):
            model.fit(of_each, verbose=0)
        assert sum("auto_shard=True, not False" in line for line in lines) == kdist.is_chief()
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(of_each, verbose=0)


def orders_by_the_number_of_cores() -> None:
    """An `interleave` without `cycle_length` reads as many files at once as a process has cores."""
    numbers = tf.data.Dataset.range(8)
    x = tf.ones((4, 5))

    def inner(number: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, tf.fill((4, 2), tf.cast(number, tf.float32))))

    cores = os.sched_getaffinity(0)
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        try:
            os.sched_setaffinity(0, {min(cores)} if kdist.rank() else cores)
            assert len(set(everyone(len(os.sched_getaffinity(0))))) == 2, "cores to leave out"
            for calls in (None, tf.data.AUTOTUNE):
                with refused(DataError, "another order on each rank", "core(s) on rank 0", "cycle_length=8"):
                    model.fit(numbers.interleave(inner, num_parallel_calls=calls).batch(BATCH), verbose=0)
                model.fit(numbers.interleave(inner, 2, num_parallel_calls=calls).batch(BATCH), verbose=0)
        finally:
            os.sched_setaffinity(0, cores)
        model.fit(numbers.interleave(inner).batch(BATCH), verbose=0)


def filters_that_draw_other_numbers() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(rows("even"))

    def some(seed: int) -> tf.data.Dataset:
        generator = tf.random.Generator.from_seed(seed)
        return dataset.filter(lambda *_: generator.uniform([]) < 0.5).batch(BATCH)

    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with refused(MismatchError, "random states", "in Filter"):
            model.fit(some(1 + kdist.rank()), verbose=0)
        model.fit(some(1), verbose=0)


def other_methods() -> None:
    x, y = rows("even")
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with refused(MismatchError, "fit", "evaluate", "rank 1"):
            model.evaluate(x, y, verbose=0) if kdist.rank() else model.fit(x, y, verbose=0)
        with refused(MismatchError, "predict", "evaluate"):
            model.evaluate(x, y, verbose=0) if kdist.rank() else model.predict(x, verbose=0)


def other_scopes() -> None:
    with refused(MismatchError, "scale_batch", "rank 1"), kdist.scope(scale_batch=bool(kdist.rank())):
        pass


# One rank's mistake is known to it alone, or to all.


def no_samples() -> None:
    x, y = rows("even")
    empty = tf.data.Dataset.from_tensor_slices((x[:0], y[:0])).batch(BATCH)
    unknown = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *_: False).batch(BATCH)
    for data in (empty, unknown, iter(())):
        with kdist.scope():
            model = mlp()
            model.compile("sgd", "mse")
            with pytest.raises((DataError, ValueError)) as raised:
                model.fit(data, verbose=0)
            assert_equal_everywhere(type(raised.value).__name__)


def scopes_that_cannot_be() -> None:
    with kdist.scope(), refused(ScopeError, "open already"), kdist.scope():
        pass
    with kdist.scope():
        pass
    for wrong in (
        {"strategy": "mpirun"},
        {"strategy": "tpu"},
        {"strategy": 3},
        {"scale_lr": "cubic"},
        {"scale_lr": -1.0},
        {"warmup_epochs": -1},
    ):
        with no_strategy_in_environment(), pytest.raises(StrategyError), kdist.scope(**wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(StrategyError):
        kdist.AllReduce(engine="nccl")  # type: ignore[arg-type]
    kdist.barrier()


def a_model_that_overrides_fit_was_made_outside() -> None:
    class Own(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs)

    outside = Own([keras.Input((5,)), keras.layers.Dense(2)])
    outside.compile("sgd", "mse")
    with kdist.scope():
        with refused(ScopeError, "Own.fit", "into the scope"):
            fit(outside)
        inside = Own([keras.Input((5,)), keras.layers.Dense(2)])
        inside.compile("sgd", "mse")
        fit(inside)
    assert_equal_everywhere([np.asarray(v).tolist() for v in inside.weights])


def a_model_built_on_one_rank_alone() -> None:
    """`predict_on_batch` is the one method before which Keras does not build it on the others."""
    x, _ = rows("even")
    with kdist.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        if kdist.is_chief():
            model.build((None, 5))
        with refused(MismatchError, "predict_on_batch", "built"):
            model.predict_on_batch(x)


def good_models_are_not_refused() -> None:
    """The twin: the same checks let ranks pass that differ in what may differ."""
    x, y = rows("even")
    with kdist.scope():
        for _ in range(kdist.rank()):
            keras.layers.Dense(1)  # automatic names then differ between the ranks
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
        for _ in range(kdist.rank()):
            keras.optimizers.SGD()
        model.compile(
            keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()]
        )
        fit(model, verbose=kdist.rank(), callbacks=[keras.callbacks.Callback()] * kdist.rank())
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        generator = ((x[i : i + BATCH], y[i : i + BATCH]) for i in itertools.cycle(range(0, len(x), BATCH)))
        model.fit(generator, steps_per_epoch=3, verbose=0)
    assert_equal_everywhere([np.asarray(v).tolist() for v in model.weights])


CASES = {
    function.__name__: function
    for function in (
        an_update_without_a_reduction,
        an_update_without_a_reduction_on_batch,
        an_optimizer_hidden_in_a_closure,
        models_of_other_widths,
        models_of_other_depths,
        other_frozen_layers,
        other_optimizers,
        other_losses_and_metrics,
        other_arguments_of_fit,
        other_kinds_of_data,
        one_cache_for_the_ranks_of_a_host,
        shards_of_shards,
        orders_by_the_number_of_cores,
        filters_that_draw_other_numbers,
        other_methods,
        other_scopes,
        no_samples,
        scopes_that_cannot_be,
        a_model_that_overrides_fit_was_made_outside,
        a_model_built_on_one_rank_alone,
        good_models_are_not_refused,
    )
}
