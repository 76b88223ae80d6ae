"""Each feature of Keras' training once: N ranks against one process (see `fidelity.py`)."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._process import open_engine
from kdist.engines.single import SingleEngine
from kdist.errors import MismatchError, NotSynchronizedError, ScopeError, StrategyError
from kdist.gradients import top_k as top_k_module
from kdist.gradients.power_sgd import PowerSGD
from tests.helpers.logs import logged
from tests.training.fidelity import (
    BATCH,
    Batches,
    both,
    compare,
    deterministic_weights,
    endless,
    fed,
    fit_alone,
    fit_evaluate_predict,
    fresh,
    mlp,
    of_the_chief,
    outcome,
    rows,
    size,
)

FEATURES: dict[str, Callable[[], None]] = {}


def feature(function: Callable[[], None]) -> Callable[[], None]:
    FEATURES[function.__name__] = function
    return function


def simple(
    compile_: Callable[[], dict[str, Any]],
    shape: str = "ragged",
    model: Callable[[], keras.Model] = mlp,
    kind: str = "arrays",
    rtol: float = 1e-9,
    scope: dict[str, Any] | None = None,
    all_verbs: bool = False,
    **fit: Any,
) -> None:
    x, y = rows(shape)

    def script(batch: int) -> dict[str, Any]:
        made = model()
        made.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse", **compile_()})
        data = fed(kind, (x, y), batch)
        return fit_evaluate_predict(made, data, x, y, batch, **fit) if all_verbs else fit_alone(made, data, **fit)

    both(script, rtol=rtol, **(scope or {}))


# Arguments of fit.


@feature
def validation_split() -> None:
    simple(dict, validation_split=0.3)


@feature
def validation_data_arrays() -> None:
    simple(dict, validation_data=rows("ragged", seed=9), validation_freq=2)


@feature
def validation_in_larger_batches() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        # A mean of the batches' maxima: another size of batches gives another one.
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[lambda y, p: tf.reduce_max(tf.abs(y - p), axis=-1)])
        validation = {"validation_data": rows("even", seed=9), "validation_batch_size": 3 * batch}
        return fit_alone(model, fed("arrays", (x, y), batch), **validation)

    both(script)


@feature
def validation_data_generator() -> None:
    x, y = rows("ragged")
    # One global batch again and again: Keras begins anew at each epoch, and loses what its thread has drawn ahead.
    held_out = tuple(a[: size() * BATCH] for a in rows("even", seed=9))

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        validation = {"validation_data": endless(held_out, batch), "validation_steps": 3 * size() * BATCH // batch}
        return fit_alone(model, fed("arrays", (x, y), batch), **validation)

    both(script)


@feature
def validation_data_dataset_and_steps() -> None:
    x, y = rows("ragged")
    vx, vy = rows("even", seed=9)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        validation = tf.data.Dataset.from_tensor_slices((vx, vy)).batch(batch)
        steps = 2 * size() * BATCH // batch
        return fit_alone(model, fed("arrays", (x, y), batch), validation_data=validation, validation_steps=steps)

    both(script)


@feature
def validation_py_dataset_and_batch_size() -> None:
    x, y = rows("ragged")
    vx, vy = rows("ragged", seed=9)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return fit_alone(model, fed("py_dataset_workers", (x, y), batch), validation_data=Batches((vx, vy), batch))

    both(script)


@feature
def class_weight() -> None:
    x, _ = rows("ragged")
    y = (x[:, 0] > 0).astype("int64")

    def script(batch: int) -> dict[str, Any]:
        model = mlp(activation="softmax")
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return fit_alone(model, fed("arrays", (x, y), batch), class_weight={0: 0.3, 1: 2.0})

    both(script)


@feature
def sample_weight() -> None:
    for kind in ("arrays", "tf_data", "py_dataset"):
        x, y = rows("ragged")
        weight = np.linspace(0.0, 2.0, len(x))

        def script(batch: int, kind: str = kind, x: Any = x, y: Any = y, weight: Any = weight) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], weighted_metrics=["mse"])
            return fit_alone(model, fed(kind, (x, y, weight), batch))

        both(script)


@feature
def steps_per_epoch_continues() -> None:
    """An epoch of fewer steps than the data has: the next one goes on where it stopped, and the last is ragged."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()
        steps = 2 * size() * BATCH // batch
        history = model.fit(dataset, steps_per_epoch=steps, epochs=3, verbose=0)
        return outcome(model, history)

    both(script)


@feature
def initial_epoch() -> None:
    simple(dict, initial_epoch=1)


@feature
def steps_per_execution() -> None:
    simple(lambda: {"steps_per_execution": 2, "metrics": ["mae"]}, all_verbs=True)


@feature
def run_eagerly() -> None:
    simple(lambda: {"run_eagerly": True, "metrics": ["mae"]}, all_verbs=True)


@feature
def jit_compile() -> None:
    """XLA compiles what the model computes, and its gradient; losses that the layers add come out of it."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh", activity_regularizer="l2"), keras.layers.Dense(2)]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], jit_compile=True)
        result = fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)
        if batch == BATCH:
            # Two products of matrices forward, and three backward.
            assert max(products_compiled_by_xla(model.train_function), default=0) == 5
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, y, batch_size=batch, verbose=0)
        if batch == BATCH:
            assert not products_compiled_by_xla(model.train_function)
        return result

    both(script)


def products_compiled_by_xla(train_function: Any) -> list[int]:
    """Returns how many products of matrices there are in each function of a `train_function` that XLA compiles."""
    graphs = [each.graph.as_graph_def() for each in train_function._step._list_all_concrete_functions()]
    functions = [each for graph in graphs for each in graph.library.function if each.attr["_XlaMustCompile"].b]
    return [sum(node.op == "MatMul" for node in each.node_def) for each in functions]


@feature
def jit_compile_of_a_recurrent_model() -> None:
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        layers = [keras.layers.Embedding(9, 4), keras.layers.GRU(3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=True)
        return fit_alone(model, fed("arrays", (x, y[:, 0]), batch))

    both(script)


@feature
def jit_compile_is_off_where_messages_are_sent_before() -> None:
    def normalised() -> keras.Model:
        layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(synchronized=True, momentum=0.7)]
        made = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(2)])
        deterministic_weights(made)
        return made

    x, y = sequences()

    def masked(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    def own_step(batch: int) -> dict[str, Any]:
        model = OwnStep()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01), jit_compile=True)
        x, y = rows("ragged")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    def watched(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        callbacks = [kdist.callbacks.NaNPolicy("raise", engine=None if batch == BATCH else SingleEngine())]
        x, y = rows("ragged")
        return outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks))

    reasons = ["its loss or its layers send messages before", "a train_step of its own", "callbacks look into its"]
    with logged() as said:
        simple(lambda: {"jit_compile": True}, model=normalised, rtol=1e-7)
        both(masked, rtol=1e-9 if keras.__version__ >= "3.13" else 1e-6)
        both(own_step)
        both(watched)
    told = [sum(reason in each for each in said) for reason in reasons]
    assert told == ([2, 1, 1] if kdist.is_chief() else [0, 0, 0]), said


@feature
def gradients_in_several_messages() -> None:
    """The same sums, a message for each layer or two; sparse gradients and statistics among them."""
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    def messages(bucket_mb: float | None) -> int:
        """Returns how many a step sends, as it is traced; one more is for rates that some rank asks for."""
        engine, sent = open_engine(kdist.cluster_info()), -1
        fresh()
        with kdist.scope(kdist.AllReduce(bucket_mb=bucket_mb), scale_lr=None):
            model = mlp()
            model.compile("sgd", "mse")
            allreduce = engine.allreduce

            def counted(tensors: Any) -> Any:
                nonlocal sent
                sent += not tf.executing_eagerly()
                return allreduce(tensors)

            engine.__dict__["allreduce"] = counted
            try:
                model.fit(*rows("even"), batch_size=BATCH, verbose=0)
            finally:
                del engine.__dict__["allreduce"]
        return sent

    assert messages(None) == 1
    assert messages(1e-6) == len(mlp().trainable_variables)
    both(script, strategy=kdist.AllReduce(bucket_mb=1e-4), rtol=1e-9 if keras.__version__ >= "3.13" else 1e-6)
    simple(lambda: {"run_eagerly": True}, scope={"strategy": kdist.AllReduce(bucket_mb=1e-4)})


@feature
def sparse_gradients_as_dense_ones() -> None:
    x, y = sequences()
    applied: set[tuple[bool, bool]] = set()  # in the scope or not, slices or not

    class Noting(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            applied.add((tf.distribute.has_strategy(), any(isinstance(each, tf.IndexedSlices) for each in grads)))
            return super().apply(grads, trainable_variables)

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(Noting(0.1, momentum=0.9), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    rtol = 1e-9 if keras.__version__ >= "3.13" else 1e-6  # Keras before adds an epsilon to the count of unmasked steps
    both(script, rtol=rtol, strategy=kdist.AllReduce(sparse_as_dense=True))
    assert applied == {(True, False)} | ({(False, True)} if kdist.is_chief() else set())  # who trains plainly, too


@feature
def gradients_of_16_bits() -> None:
    """Near what they are in full, not equal, and to the bit the same on all ranks."""
    x, y = sequences()
    errors = {}

    def script(batch: int) -> dict[str, Any]:
        model = sequence_model()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    plain = of_the_chief(lambda: script(size() * BATCH))
    engine = open_engine(kdist.cluster_info())
    with logged() as said:
        for compression, bucket_mb in (("fp16", None), ("bf16", 1e-4)):
            fresh()
            with kdist.scope(kdist.AllReduce(compression=compression, bucket_mb=bucket_mb), scale_lr=None):
                ours = script(BATCH)
            weights = [each.tolist() for each in ours["weights"]]
            assert all(theirs == weights for theirs in engine.gather_objects(weights))
            errors[compression] = max(
                float(np.max(np.abs(one - other)) / np.max(np.abs(one)))
                for one, other in zip(plain["weights"], ours["weights"], strict=True)
            )
    # Each gradient is rounded twice, and all together move a variable by less than its size: the rate is low.
    assert 1e-7 < errors["fp16"] < 2 * 2.0**-11, errors
    assert errors["fp16"] < errors["bf16"] < 2 * 2.0**-8, errors
    told = [each for each in said if "bytes of gradients travel" in each]
    assert len(told) == (2 if kdist.is_chief() else 0), said


class OneProcessPowerSGD(keras.optimizers.SGD):
    """Compresses the gradients of one process as ranks compress theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compression = PowerSGD(1)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        sums, _ = self.compression.sum(SingleEngine(), list(grads), [], variables)
        return super().apply(sums, trainable_variables)


@feature
def power_sgd() -> None:
    """What is sent and what is kept depend on the sum of the ranks' gradients alone: as in one process, to rounding."""
    x, y = rows("ragged")
    strategy = kdist.AllReduce(compression="powersgd", powersgd_rank=1)

    def script(batch: int, **compiled: Any) -> dict[str, Any]:
        model = mlp()
        kind = keras.optimizers.SGD if batch == BATCH else OneProcessPowerSGD
        model.compile(kind(0.05, momentum=0.9), "mse", **compiled)
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script, strategy=strategy)
    both(functools.partial(script, run_eagerly=True), strategy=strategy)


@feature
def a_rank_whose_gradient_is_not_finite_spoils_nothing_that_is_kept() -> None:
    """All ranks leave that step out, and go on as if it had not been."""
    x, y = rows("even")
    spoilt = x.copy()
    spoilt[(size() + 1) * BATCH - 1] = np.nan  # in the second step, on the first rank
    without = [each[np.r_[0 : size() * BATCH, 2 * size() * BATCH : len(x)]] for each in (x, y)]
    for options in ({"compression": "powersgd", "powersgd_rank": 1}, {"compression": "topk", "topk_ratio": 0.1}):
        ends = []
        for inputs, targets in ((spoilt, y), without):
            fresh()
            with kdist.scope(kdist.AllReduce(**options), scale_lr=None):
                model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(2)])
                deterministic_weights(model)
                model.compile(keras.optimizers.SGD(0.002), "mse")
                callbacks = [kdist.callbacks.NaNPolicy("skip")]
                model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
            ends.append([each.tolist() for each in model.get_weights()])
        assert ends[0] == ends[1], options
        assert all(theirs == ends[0] for theirs in open_engine(kdist.cluster_info()).gather_objects(ends[0]))


@feature
def a_second_fit_keeps_nothing_of_the_first() -> None:
    """What was left out was of the weights that there were then."""
    x, y = rows("ragged")
    with kdist.scope(kdist.AllReduce(compression="powersgd", powersgd_rank=1), scale_lr=None):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        start, ends = model.get_weights(), []
        for _ in range(2):
            model.set_weights(start)
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
            ends.append([each.tolist() for each in model.get_weights()])
    assert ends[0] == ends[1]


@feature
def top_k() -> None:
    """All of the numbers: the sum. Some of them: near it, the same on all ranks, and a training that gets on."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(300, activation="tanh"), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.002), "mse")
        return outcome(model, model.fit(**fed("arrays", (x, y), batch), epochs=8, verbose=0))

    both(script, strategy=kdist.AllReduce(compression="topk", topk_ratio=1.0))
    fresh()
    with logged() as said, kdist.scope(kdist.AllReduce(compression="topk", topk_ratio=0.1), scale_lr=None):
        ours = script(BATCH)
    weights = [each.tolist() for each in ours["weights"]]
    assert all(theirs == weights for theirs in open_engine(kdist.cluster_info()).gather_objects(weights))
    losses = ours["history"]["loss"]
    assert losses[-1] < 0.7 * losses[0], losses
    sent = 150 * (8 + 4) + 8 * (300 + 600 + 2)  # float64, and int32 for places
    told = f"{sent:,} bytes of gradients travel in an update, not {8 * 2402:,}, as the largest 10 % of each"
    assert sum(told in each for each in said) == kdist.is_chief(), said


@feature
def compressed_gradients_beside_other_features() -> None:
    """Where all numbers are sent, by compression's ways, the results are those of one process."""
    scope = {"strategy": kdist.AllReduce(compression="topk", topk_ratio=1.0, bucket_mb=1e-4)}
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(top_k_module, "_SMALL", 1)
        _two_optimizers(**scope)
        assert sum("bytes of gradients travel" in each for each in said) == 2 * kdist.is_chief(), said
        simple(
            lambda: {
                "optimizer": keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
                "steps_per_execution": 2,
                "jit_compile": True,
            },
            scope=scope,
        )


@feature
def what_is_left_out_is_not_kept_while_the_loss_scale_changes() -> None:
    x, y = rows("ragged")
    with kdist.scope(kdist.AllReduce(compression="powersgd"), scale_lr=None):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, dtype="mixed_float16")])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        with pytest.raises(StrategyError, match="mixed_bfloat16"):
            model.fit(x, y, verbose=0)


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
def split_batches() -> None:
    """`scale_batch=False`: each batch of the user's is split, whatever kind it comes in."""
    _split_batches(("arrays", "ragged"), ("tf_data", "few"), ("py_dataset", "ragged"), ("generator", "few"))


@feature
def split_batches_of_other_sizes() -> None:
    _split_batches(("arrays", "few"), ("tf_data", "ragged"), ("py_dataset", "few"), ("generator", "ragged"))


def _split_batches(*kinds: tuple[str, str]) -> None:
    for kind, shape in kinds:
        x, y = rows(shape)

        def script(_: int, kind: str = kind, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            data = fed(kind, (x, y), 6)
            if kind != "arrays":  # what is evaluated and predicted is always arrays
                return fit_alone(model, data)
            return fit_evaluate_predict(model, data, x, y, 6)

        both(script, scale_batch=False)


# Losses.


def sequences() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    n = 2 * size() * BATCH + 3
    tokens = generator.integers(1, 9, size=(n, 6))
    for row, length in enumerate(generator.integers(1, 7, size=n)):
        tokens[row, length:] = 0
    return tokens, generator.normal(size=(n, 6, 1))


def sequence_model(inner: type[keras.Layer] = keras.layers.Dense, **kwargs: Any) -> keras.Model:
    layers = [keras.layers.Embedding(9, 4, mask_zero=True), inner(3, **kwargs), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
    deterministic_weights(model)
    return model


@feature
def masked_sequences() -> None:
    """Masks, an embedding, a recurrent layer, a masked metric; ranks have different numbers of unmasked steps."""
    x, y = sequences()
    rtol = 1e-9 if keras.__version__ >= "3.13" else 1e-6  # Keras before adds an epsilon to the count of unmasked steps

    def recurrent(batch: int) -> dict[str, Any]:
        model = sequence_model(keras.layers.SimpleRNN, return_sequences=True)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(recurrent, rtol=rtol)
    for reduction in ("mean_with_sample_weight", "sum"):

        def script(batch: int, reduction: str = reduction) -> dict[str, Any]:
            model = sequence_model()
            model.compile("adam", keras.losses.MeanSquaredError(reduction=reduction), metrics=["mae"])
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script, rtol=rtol)


@feature
def sequences_of_unknown_length() -> None:
    x, y = sequences()

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int64"),
                keras.layers.Embedding(9, 4),
                keras.layers.SimpleRNN(3, return_sequences=True),
            ]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return fit_evaluate_predict(
            model, fed("tf_data", (x, np.repeat(y, 3, axis=-1)), batch), x, np.repeat(y, 3, axis=-1), batch
        )

    both(script)


@feature
def py_dataset_of_batches_of_other_lengths() -> None:
    """Batches padded for themselves: all of a rank's may have one length, another than the other ranks'."""

    class Trimmed(Batches):
        def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
            x, y = super().__getitem__(index)
            return x[:, : np.count_nonzero(np.any(x, axis=(0, 2)))], y

    def sequences_in(num_batches: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(num_batches).normal(size=(num_batches * BATCH, 9, 3))
        for number in range(num_batches):
            x[number * BATCH : (number + 1) * BATCH, 4 + number % size() :] = 0
        return x, np.sum(x, axis=(1, 2))[:, None]

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [
                keras.Input((None, 3)),
                keras.layers.Dense(4, activation="tanh", use_bias=False),
                keras.layers.Lambda(lambda h: keras.ops.sum(h, axis=1)),
                keras.layers.Dense(1),
            ]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        held_out = Trimmed(sequences_in(size()), batch)  # one step
        history = model.fit(
            Trimmed(sequences_in(3 * size()), batch), epochs=2, shuffle=False, validation_data=held_out, verbose=0
        )
        return outcome(model, history)

    both(script)


@feature
def loss_reductions() -> None:
    weight = np.linspace(0.1, 3.0, len(rows("ragged")[0]))
    x, y = rows("ragged")
    for reduction in ("sum", "mean_with_sample_weight", "sum_over_batch_size"):

        def script(batch: int, reduction: str = reduction) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=reduction))
            return fit_alone(model, fed("arrays", (x, y, weight), batch))

        both(script)


@feature
def sums_of_what_a_step_counts() -> None:
    """A number that a step hands to `Sum` counts something: rows, hits. One that it hands to `Mean` is a mean."""
    x, y = rows("ragged")

    class Counting(keras.Sequential):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.num_rows, self.num_hits = keras.metrics.Sum("num_rows"), keras.metrics.Sum("num_hits")
            self.error = keras.metrics.Mean("error")

        def test_step(self, data: Any) -> Any:
            x, y = data
            error = tf.abs(self(x)[:, 0] - y[:, 0])
            self.num_rows.update_state(tf.shape(x)[0])
            self.num_hits.update_state(tf.reduce_sum(tf.cast(error < 1.0, tf.float64)))
            self.error.update_state(tf.reduce_mean(error))
            return {metric.name: metric.result() for metric in (self.num_rows, self.num_hits, self.error)}

    def script(batch: int) -> dict[str, Any]:
        model = Counting([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(loss="mse")
        return {"evaluate": model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)}

    both(script)


@feature
def losses_that_leave_out_a_class() -> None:
    """What is left out differs between the ranks, alone and where sequences have a mask, too."""
    x, _ = rows("ragged")
    x = np.stack([x, x * 2, -x, x + 1], axis=1)
    classes = np.arange(len(x) * 4).reshape(-1, 4) % 3
    ignored = np.where(np.arange(4) < (np.arange(len(x)) % 5)[:, np.newaxis], -1, classes)
    weight = np.linspace(0.1, 3.0, ignored.size).reshape(ignored.shape)
    x[::3, 2:] = 0.0
    # Keras 3.12 adds 1e-7 to the number of what counts.
    rtol = 1e-7 if keras.__version__.startswith("3.12.") else 1e-9
    for length, is_masked in ((4, False), (None, False), (4, True)):
        for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):

            def script(
                batch: int, length: Any = length, is_masked: bool = is_masked, reduction: str = reduction
            ) -> dict[str, Any]:
                masking = [keras.layers.Masking()] if is_masked else []
                model = keras.Sequential([keras.Input((length, 5)), *masking, keras.layers.Dense(3)])
                deterministic_weights(model)
                loss = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, ignore_class=-1, reduction=reduction
                )
                model.compile(keras.optimizers.SGD(0.1), loss)
                return fit_evaluate_predict(model, fed("arrays", (x, ignored, weight), batch), x, ignored, batch)

            both(script, rtol=rtol)


@feature
def losses_whose_call_is_the_instances_own() -> None:
    class Chosen(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.call = self.squared

        def squared(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    simple(lambda: {"loss": Chosen()}, all_verbs=True)


@feature
def regularizers_and_add_loss() -> None:
    class Activity(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    def model() -> keras.Model:
        made = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, kernel_regularizer="l2", activation="tanh", activity_regularizer="l2"),
                Activity(),
                keras.layers.ActivityRegularization(l1=0.1),
                keras.layers.Dense(2, bias_regularizer="l2"),
            ]
        )
        deterministic_weights(made)
        return made

    simple(lambda: {"metrics": ["mae"]}, model=model, all_verbs=True)


@feature
def several_outputs() -> None:
    """Two outputs with losses of different denominators, loss weights, weights for one output, a metric for each."""
    for shape in ("ragged", "one short"):
        _several_outputs(shape)


def _several_outputs(shape: str) -> None:
    x, y = rows(shape)
    x2 = x[:, :3] * 2
    weight = np.linspace(0.0, 2.0, len(x))

    def script(batch: int) -> dict[str, Any]:
        a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
        hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([a, b]))
        model = keras.Model(
            {"a": a, "b": b},
            {"one": keras.layers.Dense(2, name="one")(hidden), "two": keras.layers.Dense(1, name="two")(hidden)},
        )
        deterministic_weights(model)
        model.compile(
            keras.optimizers.Adam(0.01),
            loss={"one": "mse", "two": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")},
            loss_weights={"one": 0.3, "two": 2.0},
            metrics={"one": ["mae"], "two": ["mse"]},
        )
        inputs, targets = {"a": x, "b": x2}, {"one": y, "two": y[:, :1]}
        weights = {"one": np.ones(len(x)), "two": weight}
        history = model.fit(
            inputs, targets, sample_weight=weights, batch_size=batch, epochs=2, shuffle=False, verbose=0
        )
        if shape != "ragged":
            return outcome(model, history)
        return outcome(
            model,
            history,
            evaluate=model.evaluate(inputs, targets, batch_size=batch, verbose=0, return_dict=True),
            predict=model.predict(inputs, batch_size=batch, verbose=0),
        )

    both(script)


# Optimizers' own features.


@feature
def clipping() -> None:
    for clip in ({"clipnorm": 0.01}, {"clipvalue": 0.003}, {"global_clipnorm": 0.01}):
        simple(lambda clip=clip: {"optimizer": keras.optimizers.SGD(0.5, momentum=0.9, **clip)})


@feature
def an_optimizer_that_clips_by_hand() -> None:
    """A user's own optimizer that changes gradients before Keras sees them: it gets the global ones."""

    class Clipping(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            return super().apply_gradients([(keras.ops.clip(g, -0.01, 0.01), v) for g, v in grads_and_vars])

    simple(lambda: {"optimizer": Clipping(0.5)})


@feature
def a_fit_of_the_users_own() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.build((None, 5))
            deterministic_weights(self)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def fit(self, x: Any, y: Any, **kwargs: Any) -> Any:
            return super().fit(x * 2.0, y, **kwargs)

    simple(lambda: {"metrics": ["mae"]}, model=Own)


@feature
def a_second_model_begins_alike() -> None:
    """What is drawn from the user's seeds after a fit is what one process would have drawn."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        drawn = []
        for _ in range(2):
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            drawn.append(model.get_weights()[0].copy())
            model.fit(x, y, batch_size=batch, epochs=1, verbose=0)
            drawn.append(np.random.default_rng(int(np.random.randint(1000))).normal(size=3))
        return {"drawn": drawn}

    both(script)


@feature
def gradient_accumulation() -> None:
    simple(lambda: {"optimizer": keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)})


class AccumulatorsOfEachStep(keras.callbacks.Callback):
    """Looks between two steps, as any callback may whose methods are called there."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.found: list[list[Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append([np.asarray(v) for v in self.model.optimizer.variables if "accumulator" in v.path])


class Rows(keras.layers.Layer):
    """A table whose gradients are sparse, as those of `keras.layers.Embedding`, which is known to have them."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(9, 4))

    def call(self, numbers: Any) -> Any:
        return tf.gather(self.table.value, tf.cast(numbers, tf.int64))


@feature
def gradients_travel_with_their_update() -> None:
    """Epochs end between two updates; one layer has sparse gradients, another statistics; verbs take turns."""
    x, y = sequences()
    whole = size() * BATCH

    def script(batch: int) -> dict[str, Any]:
        norm = keras.layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((6,), dtype="int64"), Rows(), norm, keras.layers.Dense(1)])
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, global_clipnorm=0.1), "mse")
        data, looking, found = fed("arrays", (x, y), batch), AccumulatorsOfEachStep(), []
        for callbacks in ([], [looking], [keras.callbacks.ReduceLROnPlateau("loss")]):
            found.append(outcome(model, model.fit(**data, epochs=3, verbose=0, callbacks=callbacks)))
            model.train_on_batch(x[:whole], y[:whole])
            found.append(outcome(model))
        return {"found": found, "looking": looking.found}

    both(script)


@feature
def accumulated_sums_are_whole_after_all_that_may_happen() -> None:
    x, y = rows("ragged")
    whole = size() * BATCH
    engine = open_engine(kdist.cluster_info())
    folder = engine.broadcast_object(tempfile.mkdtemp() if engine.rank == 0 else None)

    class Breaking(keras.Model):
        """Raises in its fifth step, on all ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = mlp(), 0

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        def train_step(self, data: Any) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise ValueError("in the fifth step")
            return super().train_step(data)

    def compiled(model: keras.Model, **options: Any) -> keras.Model:
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse", **options)
        return model

    def an_own_loop(batch: int) -> dict[str, Any]:
        model = compiled(mlp())
        model.fit(**fed("arrays", (x, y), batch), verbose=0)
        step = tf.function(lambda data: tf.distribute.get_strategy().run(model.train_step, args=(data,)))
        for _ in range(4):
            step((tf.constant(x[:whole]), tf.constant(y[:whole])))
        return outcome(model)

    def an_error_that_is_caught(batch: int) -> dict[str, Any]:
        model = compiled(Breaking(), run_eagerly=True)
        model.train_on_batch(x[:whole], y[:whole])
        with pytest.raises(ValueError, match="in the fifth step"):
            model.fit(**fed("arrays", (x, y), batch), epochs=9, verbose=0)
        for _ in range(4):
            model.train_on_batch(x[:whole], y[:whole])
        return outcome(model)

    def a_load_on_one_rank(batch: int) -> dict[str, Any]:
        model = compiled(mlp())
        model.fit(**fed("arrays", (x, y), batch), verbose=0)
        file = f"{folder}/{batch}.weights.h5"
        model.save_weights(file)
        loading = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.load_weights(file))
        loads = batch == whole or engine.rank == 1  # plainly, and on one of the ranks
        return outcome(
            model,
            model.fit(**fed("arrays", (x, y), batch), epochs=2, verbose=0, callbacks=[loading] if loads else []),
        )

    def a_fit_within_a_fit(batch: int) -> dict[str, Any]:
        model, looking = compiled(mlp()), AccumulatorsOfEachStep()
        data = fed("arrays", (x, y), batch)
        again = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.fit(**data, verbose=0))
        model.fit(**data, epochs=2, verbose=0, callbacks=[looking, again])
        return outcome(model, looking=looking.found)

    for script in (an_own_loop, an_error_that_is_caught, a_load_on_one_rank, a_fit_within_a_fit):
        print(script.__name__, flush=True)
        both(script)


@feature
def gradients_travel_in_each_step_if_someone_looks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saving = functools.partial(keras.callbacks.ModelCheckpoint, f"{folder}/model.keras")
        for callbacks, expected in (
            ([], 2),
            ([kdist.callbacks.Throughput(), kdist.callbacks.ChiefOnly(saving())], 2),
            ([keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)], 7),
            ([saving(save_freq=10**9)], 7),
            # On one rank only: all must do the same.
            ([keras.callbacks.TerminateOnNaN()] if open_engine(kdist.cluster_info()).rank == 1 else [], 7),
        ):
            assert messages_of_gradients(callbacks) == expected, callbacks


def messages_of_gradients(callbacks: list[Any]) -> int:
    """Returns how many messages the gradients of 7 steps are sent in, 3 steps an update."""
    engine = open_engine(kdist.cluster_info())
    allreduce, sent = engine.allreduce, []

    def noted(tensors: Any) -> Any:
        if not tf.executing_eagerly() and sum(each.shape.rank == 2 for each in tensors) == 2:  # the kernels
            tf.py_function(lambda: sent.append(1), [], [])
        return allreduce(tensors)

    fresh()
    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
        engine.__dict__["allreduce"] = noted
        try:
            x, y = np.ones((7 * BATCH * size(), 5)), np.ones((7 * BATCH * size(), 2))
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        finally:
            del engine.__dict__["allreduce"]
    return len(sent)


@feature
def moving_average_of_weights() -> None:
    simple(lambda: {"optimizer": keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)})


@feature
def schedules() -> None:
    simple(lambda: {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))})


@feature
def loss_scale() -> None:
    simple(
        lambda: {
            "optimizer": keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=2
            )
        }
    )


@feature
def constraints() -> None:
    def model() -> keras.Model:
        made = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(2, kernel_constraint=keras.constraints.MaxNorm(0.3))]
        )
        deterministic_weights(made)
        return made

    simple(dict, model=model)


@feature
def mixed_precision_scales_as_one() -> None:
    """float16 overflows on one rank only: all ranks skip the step and halve the scale."""
    x, y = rows("ragged")
    x[1] = 6.5e4  # one row, on one rank, where the first layer overflows

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(1e-3), "mse")
            model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
            return {"scale": float(model.optimizer.dynamic_scale), "iterations": int(model.optimizer.iterations)}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script)


@feature
def mixed_bfloat16() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            assert model.layers[0].compute_dtype == "bfloat16"
            model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
            return {"weights": model.get_weights()}
        finally:
            keras.config.set_dtype_policy("float32")

    both(script, rtol=0.02)  # a rounding of bfloat16 is 0.004


# Layers.


@feature
def synchronized_batch_normalization() -> None:
    def model() -> keras.Model:
        made = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6),
                keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(2),
            ]
        )
        deterministic_weights(made)
        return made

    # The variance is a difference of means: it loses digits.
    simple(lambda: {"metrics": ["mae"]}, model=model, rtol=1e-7, all_verbs=True)
    if size() > 2:
        simple(lambda: {"metrics": ["mae"]}, model=model, shape="few", rtol=1e-7)


@feature
def batch_normalization_is_merged() -> None:
    """Unsynchronised batch norm departs from one process; its statistics are the same on all ranks all the same."""
    keras.config.set_floatx("float64")
    x, y = rows("ragged")
    with kdist.scope(scale_lr=None):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    mean = model.layers[0].moving_mean.numpy()
    assert np.all(np.abs(mean) > 1e-6)
    everyone = open_engine(kdist.cluster_info()).gather_objects(mean.tolist())
    assert all(theirs == everyone[0] for theirs in everyone)


@feature
def frozen_layers_and_recompiling() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script)


@feature
def a_constant_does_not_drift() -> None:
    """A non-trainable weight that no step writes stays what it is, bit for bit."""
    x, y = rows("ragged")
    third = np.full(5, 1 / 3)

    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(
                shape=(5,), trainable=False, initializer=lambda s, dtype: tf.constant(third, dtype)
            )

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Scale(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=batch, epochs=3, verbose=0)
        assert np.array_equal(model.layers[0].factor.numpy(), third)
        return {}

    both(script)


@feature
def a_counter_of_rows_counts_all_ranks() -> None:
    x, y = rows("ragged")

    class Counter(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(
                shape=(), dtype="int64", trainable=False, initializer="zeros", aggregation="sum"
            )

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))
            return inputs

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Counter(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


# Metrics.


@feature
def exact_metrics() -> None:
    x, _ = rows("ragged")
    y = (x[:, :1] + 0.3 * x[:, 1:2] > 0).astype("int64")

    def batch_mean(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred))

    def script(batch: int) -> dict[str, Any]:
        model = mlp(1, activation="sigmoid")
        model.compile(
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.AUC(),
                keras.metrics.Precision(),
                keras.metrics.F1Score(threshold=0.5),
                batch_mean,
            ],
        )
        return fit_evaluate_predict(
            model, fed("arrays", (x, y), batch), x, y, batch, validation_data=rows("ragged", 4)[0:1] + (y[::-1],)
        )

    both(script)


# Steps of the user's own.


class OwnStep(keras.Model):
    """The custom `train_step` of Keras' guide: its own loss, metrics updated with one number a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae]


@feature
def custom_train_step() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = OwnStep()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01))
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    both(script)


@feature
def custom_train_step_with_own_logs() -> None:
    class Own(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
            )
            return {"my_loss": loss}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Own()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    both(script)


@feature
def custom_train_step_that_returns_some_metrics() -> None:
    """Running values of a metric among other logs: an epoch's are those of the rows of all ranks."""

    class Own(OwnStep):
        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, self.tracker, self.unseen]

        def __init__(self) -> None:
            super().__init__()
            self.tracker = keras.metrics.RootMeanSquaredError(name="root", dtype=keras.config.floatx())
            self.unseen = keras.metrics.Mean(name="unseen")

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.tracker.update_state(y, self(x))
            return {**super().train_step(data), "renamed": self.tracker.result(), "square": self.tracker.result() ** 2}

        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.tracker.update_state(y, self(x))
            return {"renamed": self.tracker.result()}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Own()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_data=(x, y), verbose=0)
        history.history.pop("square")  # no metric's result any more: the last step's, averaged over the ranks
        return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=batch, return_dict=True, verbose=0))

    both(script)


@feature
def float8_layers() -> None:
    """Their scales come as gradients, but are maxima over the batch, not sums."""
    x, y = (a.astype("float32") for a in rows("ragged"))

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        model = mlp()
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    fresh()
    with kdist.scope(scale_lr="linear", warmup_epochs=1):  # while the rate rises, momentum is corrected
        assert np.isfinite(script(BATCH)["history"]["loss"]).all()
    both(script, rtol=1e-2)  # rounding to 8 bits turns the least difference into 1e-4; sums would be off by 2


@feature
def gradients_added_up_by_hand() -> None:
    """As in many a script: variables for the sums, and an update in a branch; statistics are merged in each step."""
    x, y = rows("ragged")

    class Seen(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

        def call(self, inputs: Any) -> Any:
            self.mean.assign(keras.ops.mean(inputs, axis=0))
            return inputs

    class AddsUp(keras.Model):
        def __init__(self, period: int) -> None:
            inputs = keras.Input((5,))
            super().__init__(inputs, keras.layers.Dense(2)(Seen()(inputs)))
            deterministic_weights(self)
            self.period = period
            made = {"initializer": "zeros", "trainable": False}
            self.sums = [self.add_weight(shape=v.shape, dtype=v.dtype, **made) for v in self.trainable_variables]
            self.count = self.add_weight(shape=(), dtype="int32", **made)

        def train_step(self, data: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weight)
            is_first = tf.equal(self.count % self.period, 0)
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
                total.assign(tf.where(is_first, tf.zeros_like(gradient), total) + gradient / self.period)
            self.count.assign_add(1)

            def update() -> None:
                self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))

            tf.cond(tf.equal(self.count % self.period, 0), update, lambda: None)
            return {"loss": loss}

    for period in (2, 3):

        def script(batch: int, period: int = period) -> dict[str, Any]:
            model = AddsUp(period)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            # A whole number of updates, and a step beyond.
            steps = (2 * period + 1) * (size() if batch == BATCH else 1)
            data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch)
            model.fit(data, steps_per_epoch=steps, verbose=0)
            return {"weights": [np.asarray(v) for v in model.weights]}

        both(script)


@feature
def an_optimizer_of_several() -> None:
    """Keras' `MultiOptimizer`, an optimizer for each kind of variable: it trains, unscaled."""

    def several() -> keras.optimizers.Optimizer:
        parts = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(lambda variable: parts["bias" in variable.path])

    simple(lambda: {"optimizer": several(), "metrics": ["mae"]}, all_verbs=True)


@feature
def two_optimizers() -> None:
    """A GAN: two optimizers in one step, each with its own variables; one of them clips."""
    _two_optimizers()


def _two_optimizers(**scope: Any) -> None:
    class Adversarial(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
            self.critic = keras.Sequential(
                [keras.Input((2,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
            )
            deterministic_weights(self.generator, 1)
            deterministic_weights(self.critic, 2)
            self.tracker = keras.metrics.Mean(name="critic_loss")
            self.built = True

        def compile(self, generator_optimizer: Any, critic_optimizer: Any) -> None:
            super().compile()
            self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self.critic(self.generator(x))) - keras.ops.mean(self.critic(y))
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply(tape.gradient(loss, weights), weights)
            with tf.GradientTape() as tape:
                fooled = -keras.ops.mean(self.critic(self.generator(x)))
            weights = self.generator.trainable_variables
            self.generator_optimizer.apply(tape.gradient(fooled, weights), weights)
            self.tracker.update_state(loss)
            return {"critic_loss": self.tracker.result()}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Adversarial()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, clipnorm=0.05))
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        both_optimizers = [*model.generator_optimizer.variables, *model.critic_optimizer.variables]
        # Not the unused optimizer that `compile` makes: a strategy lets Keras build it.
        return {**outcome(model, history), "optimizer": [np.asarray(v) for v in both_optimizers]}

    both(script, **scope)


# One batch at a time: the batch that is given is split.


@feature
def on_batch() -> None:
    for shape in ("ragged", "few"):
        x, y = rows(shape)

        def script(_: int, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
            trained = [model.train_on_batch(x, y, return_dict=True) for _ in range(3)]
            tested = model.test_on_batch(x, y, return_dict=True)
            return outcome(model, trained=trained, tested=tested, predicted=model.predict_on_batch(x))

        both(script)


@feature
def unbuilt_models() -> None:
    """A model without an input shape is built on the first batch, which is not lost."""
    for kind in ("arrays", "tf_data", "py_dataset", "generator"):
        x, y = rows("ragged")

        def script(batch: int, kind: str = kind, x: Any = x, y: Any = y) -> dict[str, Any]:
            model = keras.Sequential(
                [
                    keras.layers.Dense(3, kernel_initializer="ones", activation="tanh"),
                    keras.layers.Dense(2, kernel_initializer="ones"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            return fit_alone(model, fed(kind, (x, y), batch))

        both(script)


@feature
def predictions_that_are_no_plain_arrays() -> None:
    """Text, ragged tensors, and sequences whose padding differs from batch to batch."""
    x, _ = rows("ragged")
    lengths = np.arange(len(x)) % 4

    class Verdict(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return {
                "text": tf.strings.as_string(inputs[:, 0], precision=3),
                "ragged": tf.RaggedTensor.from_tensor(inputs, lengths=tf.cast(tf.abs(inputs[:, 0]) * 2, tf.int64)),
            }

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor((inputs.shape[0],))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.verdict = Verdict()

        def predict_step(self, data: Any) -> Any:
            return self.verdict.call(data)

    class PadWithin(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.RaggedTensor.from_tensor(tf.ones([tf.size(data), 3, 2]), lengths=data).to_tensor()

    class FoundNothing(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.boolean_mask(tf.ones([tf.shape(data)[0], 3, 4]), [False] * 3, axis=1)

    class Pad(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return tf.one_hot(data, 3)

    def script(batch: int) -> dict[str, Any]:
        verdict = Model().predict(x, batch_size=batch, verbose=0)
        ragged = verdict["ragged"]
        sequences = tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: tf.range(n) % 3)
        # The user's own batches in both, for their padding is what differs.
        padded = Pad().predict(sequences.padded_batch(BATCH, [None]), verbose=0)
        even = Pad().predict(sequences.take(8).padded_batch(4, [None]), verbose=0)
        assert isinstance(even, np.ndarray), type(even)
        # The input's shape is fixed, and the model's output is as wide as the widest row of a batch.
        within = PadWithin().predict(tf.data.Dataset.from_tensor_slices(lengths % 3 + 1).batch(BATCH), verbose=0)
        nothing = FoundNothing().predict(x, batch_size=batch, verbose=0)
        return {
            "text": [text.decode() for text in verdict["text"]],
            "values": ragged.flat_values.numpy(),
            "splits": ragged.row_splits.numpy(),
            "padded": padded.to_list() if isinstance(padded, tf.RaggedTensor) else padded.tolist(),
            "even": even,
            "within": within.to_list(),
            "nothing": nothing,
        }

    both(script)


@feature
def predictions_of_several_rows_a_sample() -> None:
    """A model that puts out more rows than it takes: all of them come back, in order."""
    for shape in ("ragged", "few"):
        x, _ = rows(shape)

        def script(batch: int, x: np.ndarray = x) -> dict[str, Any]:
            inputs = keras.Input((5,))
            outputs = keras.ops.reshape(keras.layers.Dense(6)(inputs), (-1, 2))
            model = keras.Model(inputs, outputs)
            deterministic_weights(model)
            return {"predict": model.predict(x, batch_size=batch, verbose=0)}

        both(script)


@feature
def weights_loaded_by_the_chief_before_it_evaluates() -> None:
    """By a callback that all ranks run; and before a first `predict_on_batch`."""
    x, y = rows("ragged")

    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if kdist.is_chief():
                self.model.set_weights([np.full(v.shape, 0.25) for v in self.model.get_weights()])
            self.result = self.model.evaluate(x, y, batch_size=BATCH, verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model, restores = mlp(), Restores()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[restores])
        other = mlp()
        if kdist.is_chief() or batch != BATCH:
            other.set_weights([np.full(v.shape, 0.5) for v in other.get_weights()])
        plain = batch != BATCH
        if plain:  # every rank is one process here
            model.set_weights([np.full(v.shape, 0.25) for v in model.get_weights()])
            restores.result = model.evaluate(x, y, batch_size=batch, verbose=0)
        return {"result": restores.result, "on batch": other.predict_on_batch(x)}

    both(script)


@feature
def predictions_of_a_dataset() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices(x).batch(batch)
        return {
            "predict": model.predict(dataset, verbose=0),
            "evaluate": model.evaluate(Batches((x, y), batch), verbose=0),
        }

    both(script)


# Models that were made elsewhere.


@feature
def adopted() -> None:
    """A model built and compiled outside of the scope, with other weights on each rank, is adopted with the root's."""
    keras.config.set_floatx("float64")
    x, y = rows("ragged")
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    for variable in model.trainable_variables:
        variable.assign_add(np.full(variable.shape, float(kdist.rank())))
    plain = fit_evaluate_predict(reference, fed("arrays", (x, y), size() * BATCH), x, y, size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = fit_evaluate_predict(model, fed("arrays", (x, y), BATCH), x, y, BATCH)
    compare(plain, ours)


@feature
def float32_smoke() -> None:
    x, y = (a.astype("float32") for a in rows("ragged"))

    def script(batch: int) -> dict[str, Any]:
        keras.config.set_floatx("float32")
        model = mlp()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script, rtol=1e-5)


@feature
def kinds_of_arrays() -> None:
    """A table of pandas, tensors, a sparse matrix of SciPy."""
    x, y = rows("ragged")
    import pandas
    import scipy.sparse

    sparse = scipy.sparse.csr_matrix(np.where(np.abs(x) > 0.5, x, 0.0))
    for features, targets in (
        (pandas.DataFrame(x), pandas.DataFrame(y)),
        (tf.constant(x), tf.constant(y)),
        (sparse, y),
    ):

        def script(batch: int, features: Any = features, targets: Any = targets) -> dict[str, Any]:
            model = keras.Sequential([keras.Input((5,), sparse=features is sparse), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            return outcome(
                model,
                model.fit(features, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0),
                predict=model.predict(features, batch_size=batch, verbose=0),
            )

        both(script)


# What a review found.


@feature
def used_before_the_scope() -> None:
    """Functions that Keras made outside of the scope hold the class's own steps: inside they are made anew."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = before.pop()
        history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        return outcome(model, history, evaluate=model.evaluate(x, y, batch_size=batch, verbose=0))

    fresh()
    before = [mlp(), mlp()]
    for model in before:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.evaluate(x, y, verbose=0)
    plain = script(size() * BATCH)
    with kdist.scope(scale_lr=None):
        ours = script(BATCH)
    compare(plain, ours)


@feature
def used_in_the_next_scope() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        if not made:
            made.append(mlp())
            made[0].compile(keras.optimizers.Adam(0.01), "mse")
        return outcome(made[0], made[0].fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0))

    fresh()
    made: list[keras.Model] = []
    plain = [script(size() * BATCH) for _ in range(2)]
    made.clear()
    ours = []
    for _ in range(2):
        with kdist.scope(scale_lr=None):
            ours.append(script(BATCH))
    for one, other in zip(plain, ours, strict=True):
        compare(one, other)


@feature
def a_loop_without_run_is_refused() -> None:
    """Keras' loop written from scratch would train each rank for itself."""
    x, y = rows("even")
    with kdist.scope():
        model = mlp()
        optimizer = keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_weights)
        with pytest.raises(NotSynchronizedError, match="strategy.run"):
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))


@feature
def arrays_in_another_order_on_each_rank_are_refused() -> None:
    """As an unseeded split of the samples gives before the scope."""
    x, y = rows("even")
    order = np.random.default_rng(kdist.rank()).permutation(len(x))
    with kdist.scope():
        model = mlp()
        model.compile("sgd", "mse")
        with pytest.raises(MismatchError, match="means of some rows"):
            model.fit(x[order], y[order], verbose=0)
        batches = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
        with pytest.raises(MismatchError, match="means of some rows"):
            model.fit(batches, verbose=0)
        drawn = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9, seed=kdist.rank() + 1).batch(BATCH)
        with pytest.raises(MismatchError, match="_ShuffleDataset of seeds"):
            model.fit(drawn, verbose=0)
        own = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
    with kdist.scope(auto_shard=False):
        model = mlp()
        model.compile("sgd", "mse")
        model.fit(own, verbose=0)


@feature
def a_loss_that_one_row_has_not() -> None:
    """A rank without data runs one row at weight 0: its gradient counts nothing, NaN or not."""
    x, y = rows("ragged")

    def spread(y_true: Any, y_pred: Any) -> Any:
        error = y_true - y_pred
        return keras.ops.mean(keras.ops.square(error), axis=-1) / keras.ops.std(y_true)  # 0 for a single row

    with kdist.scope(scale_lr=None):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.01), spread)
        model.fit(tf.data.Dataset.from_tensor_slices((x, y[:, :1])).batch(BATCH).take(size() + 1), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


@feature
def one_loss_scaled_for_two_optimizers_is_refused() -> None:
    class Two(OwnStep):
        def compile(self, first: Any, second: Any) -> None:
            super().compile(first, "mse")
            self.second = second

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x)))
            kernel, bias = self.trainable_weights
            of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
            self.optimizer.apply([of_kernel], [kernel])
            self.second.apply([of_bias], [bias])
            return {}

    x, y = rows("even")
    with kdist.scope():
        model = Two()
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        with pytest.raises(NotSynchronizedError, match="scale_loss"):
            model.fit(x, y, batch_size=BATCH, verbose=0)


@feature
def predicting_within_an_epoch() -> None:
    """What a callback predicts in the middle of an epoch leaves the epoch's metrics alone."""
    x, y = rows("ragged")

    class Predicts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.predict(x[:3], verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return outcome(
            model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=[Predicts()])
        )

    both(script)


@feature
def statistics_written_after_the_update() -> None:
    """A second forward pass after the only update: what it writes is the same on all ranks too."""

    class Teacher(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.norm = keras.layers.BatchNormalization(momentum=0.5)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.dense(self.norm(inputs, training=training))

        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            self(data[0] + 1.0, training=True)
            return logs

    x, y = rows("ragged")
    with kdist.scope(scale_lr=None):
        model = Teacher()
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    mean = model.norm.moving_mean.numpy().tolist()
    everyone = open_engine(kdist.cluster_info()).gather_objects(mean)
    assert all(theirs == everyone[0] for theirs in everyone)


@feature
def shuffled_batches() -> None:
    """What the ranks train on in shuffled epochs, trained on by one process in the same batches."""
    x, y = rows("even")
    numbers = np.arange(len(x))

    def shuffled(kind: str) -> dict[str, Any]:
        arrays = ({"x": x, "number": numbers}, y)
        if kind == "arrays":
            return {"x": arrays[0], "y": y, "batch_size": BATCH}
        data = tf.data.Dataset.from_tensor_slices(arrays)
        return {"x": data.shuffle(len(x), seed=1).batch(BATCH)}

    class Noting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.numbers: list[list[int]] = []

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs["x"])

        def train_step(self, data: Any) -> Any:
            note = lambda numbers: self.numbers.append(numbers.tolist())  # noqa: E731
            tf.numpy_function(note, [data[0]["number"]], [])
            return super().train_step(data)

    engine = open_engine(kdist.cluster_info())
    for kind in ("arrays", "tf_data"):
        fresh()
        with kdist.scope(scale_lr=None):
            ours = Noting()
            ours.compile(keras.optimizers.Adam(0.01), "mse")
            ours.fit(**shuffled(kind), epochs=2, verbose=0)
        steps = [sum(step, []) for step in zip(*engine.gather_objects(ours.numbers), strict=True)]
        first, second = sum(steps[: len(steps) // 2], []), sum(steps[len(steps) // 2 :], [])
        assert sorted(first) == sorted(second) == numbers.tolist()
        assert first != second != numbers.tolist() != first
        fresh()
        plain = mlp()
        plain.compile(keras.optimizers.Adam(0.01), "mse")
        order = first + second
        plain.fit(x[order], y[order], batch_size=size() * BATCH, shuffle=False, verbose=0)
        compare({"weights": plain.get_weights()}, {"weights": ours.inner.get_weights()})


@feature
def a_model_that_cannot_be_called() -> None:
    """As in Keras' guides: a model of its own `train_step`, whose loss is built by the step, and without a `call`."""

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.coder = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])
            deterministic_weights(self.coder)

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, x, self.coder(x))
            gradients = tape.gradient(loss, self.coder.trainable_variables)
            self.optimizer.apply(gradients, self.coder.trainable_variables)
            return {"my_loss": loss}

    x, _ = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Autoencoder()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction="sum"))
        history = model.fit(x, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return {"weights": model.coder.get_weights(), "history": history.history}

    both(script)


if importlib.util.find_spec("torch"):

    @feature
    def torch_data_loader() -> None:
        import torch

        x, y = rows("ragged")
        data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))

        def script(batch: int) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
            loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=False)
            return fit_evaluate_predict(model, {"x": loader}, x, y, batch)

        both(script)
