"""`shard="optimizer"`: the features of the fidelity suite with it, and what it does alone: memory, files, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.errors import KDistError
from kdist.keras_hooks.variables import raw_variable
from kdist.sharding import gradients
from kdist.sharding import optimizer as sharded_optimizer
from kdist.sharding.part import Part
from tests.training import fidelity
from tests.training.features import FEATURES
from tests.training.features.layers import POSITIONS, a_model_with_positions
from tests.training.fidelity import BATCH, both, compare, fed, fit_alone, fresh, mlp, outcome, rows, size, state_of


@contextlib.contextmanager
def messages_of_large_models() -> Iterator[list[int]]:
    """Lets small models send as large ones do: each rank gets its part of the sums, in a message for a layer or two.

    Yields:
        A list to which each message of parts adds how many gradients it has, as graphs are traced.
    """
    engine, small, sent = open_engine(kdist.cluster_info()), 1e-4, []
    reduce_scatter = engine.reduce_scatter

    def noted(tensors: Any) -> Any:
        sent.append(len(tensors))
        return reduce_scatter(tensors)

    engine.__dict__["reduce_scatter"] = noted
    try:
        with (
            mock.patch.object(gradients, "SMALL_BYTES", 0),
            mock.patch.object(gradients, "PARTS_MB", small),
            mock.patch.object(sharded_optimizer, "PARTS_MB", small),
        ):
            yield sent
    finally:
        del engine.__dict__["reduce_scatter"]


def sharded(function: Callable[[], None]) -> Callable[[], None]:
    """Returns a case whose scopes of N ranks have optimizers in parts, and send as those of large models do."""

    @functools.wraps(function)
    def run() -> None:
        scope = kdist.scope

        def in_parts(strategy: Any = "auto", **given: Any) -> Any:
            options = strategy if isinstance(strategy, kdist.AllReduce) else kdist.AllReduce()
            return scope(dataclasses.replace(options, shard="optimizer"), **given)

        kdist.scope = in_parts
        try:
            with messages_of_large_models():
                function()
        finally:
            kdist.scope = scope

    return run


# These have strategies or loops of their own, count messages, read accumulators, or have optimizers that are refused.
_OTHER_TOPICS = ("compression", "local_sgd", "loops")
_OTHERS = (
    *("gradients_that_some_ranks_alone_have_in_an_eager_step", "weights_that_a_callback_makes_different"),
    *("weights_that_all_ranks_load", "jit_compile_is_off_where_messages_are_sent_before"),
    *("slots_follow_weights_that_a_callback_makes_different", "weights_that_all_ranks_that_train_by_themselves_clip"),
    "averages_that_the_chief_alone_swaps_in_between_epochs",
    *("an_optimizer_that_clips_by_hand", "an_optimizer_of_several", "float8_layers", "sparse_gradients_as_dense_ones"),
    *("a_value_of_each_rank_on_purpose", "a_batch_that_is_skipped_counts_nothing"),
    "counters_of_ranks_that_train_by_themselves",
    *("gradients_in_several_messages", "gradients_travel_with_their_update"),
    "calls_send_few_messages_beside_their_steps",
    *("gradients_travel_in_each_step_if_someone_looks", "accumulated_sums_are_whole_after_all_that_may_happen"),
)

SHARD = kdist.AllReduce(shard="optimizer")
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def shared_folder() -> Path:
    """Returns a new directory, the same on all ranks."""
    return Path(open_engine(kdist.cluster_info()).broadcast_object(tempfile.mkdtemp()))


def trained(optimizer: keras.optimizers.Optimizer, model: Callable[[], keras.Model] = mlp, **fit: Any) -> keras.Model:
    made = model()
    made.compile(optimizer, "mse")
    x, y = rows("ragged")
    made.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **fit)
    return made


ALL_OPTIMIZERS = {
    **fidelity.OPTIMIZERS,
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
}


COMMON_OPTIMIZERS = ("momentum", "lamb", "adafactor")  # and Adam, by which many cases train


@case
def common_optimizers() -> None:
    """Elementwise ones update ranges, the others whole weights at an owner; clipped by the norm of all gradients."""
    _each_optimizer(COMMON_OPTIMIZERS)


@case
def other_optimizers() -> None:
    _each_optimizer([name for name in ALL_OPTIMIZERS if name not in COMMON_OPTIMIZERS])


def _each_optimizer(names: Iterable[str]) -> None:
    x, y = rows("ragged")
    for name in names:

        def script(batch: int, make: Any = ALL_OPTIMIZERS[name]) -> dict[str, Any]:
            model, optimizer = mlp(), make()
            optimizer.global_clipnorm = 0.05
            model.compile(optimizer, "mse")
            return fit_alone(model, fed("arrays", (x, y), batch))

        try:
            both(script, strategy=SHARD)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@case
def decay_that_leaves_weights_out() -> None:
    """By a variable, by a variable's name, and by its layer's."""
    x, y = rows("ragged")
    for name in ("", "bias", "left_out/"):

        def script(batch: int, name: str = name) -> dict[str, Any]:
            layers = [keras.layers.Dense(6, name="left_out"), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((5,)), *layers])
            fidelity.deterministic_weights(model)
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
            excluded = {"var_names": [name]} if name else {"var_list": [model.trainable_variables[0]]}
            optimizer.exclude_from_weight_decay(**excluded)
            model.compile(optimizer, "mse")
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script, strategy=SHARD)


@case
def decay_that_leaves_weights_out_of_a_built_optimizer() -> None:
    """As after `load_model`: Keras takes the exclusion until the first step is traced."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.3), "mse")
        model.optimizer.build(model.trainable_variables)
        model.optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:2])
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script, strategy=SHARD)


@case
def sparse_gradients() -> None:
    """Adam squares each reading of a row by itself: in a table of many rows, and in one that is cut anywhere."""
    for num_rows in (5, 200):
        generator = np.random.default_rng(0)
        n = 2 * size() * BATCH + 3
        tokens, y = generator.integers(0, num_rows, size=(n, 4)), generator.normal(size=(n, 1))

        def script(batch: int, tokens: Any = tokens, y: Any = y, num_rows: int = num_rows) -> dict[str, Any]:
            layers = [keras.layers.Embedding(num_rows, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,), dtype="int64"), *layers])
            fidelity.deterministic_weights(model)
            model.compile(keras.optimizers.Adam(0.01, clipnorm=0.02), "mse")
            return fit_alone(model, fed("arrays", (tokens, y), batch))

        both(script, strategy=SHARD)


@case
def gradients_of_large_models() -> None:
    """Ranks get parts of some sums and all of others in one message: of sparse gradients, and where weights are whole.

    Some weights are cut by rows and others anywhere; statistics of a layer travel with them.
    """
    generator = np.random.default_rng(0)
    n = 2 * size() * BATCH + 3
    tokens, y = generator.integers(0, 50, size=(n, 4)), generator.normal(size=(n, 1))

    def script(batch: int, name: str) -> dict[str, Any]:
        norm = keras.layers.BatchNormalization(synchronized=True)
        inner = [keras.layers.Flatten(), keras.layers.Dense(40, "tanh"), norm, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,), dtype="int64"), keras.layers.Embedding(50, 3), *inner])
        fidelity.deterministic_weights(model)
        optimizer = ALL_OPTIMIZERS[name]()
        optimizer.global_clipnorm = 0.05 if name != "momentum" else None  # Keras' norm is of each reading of a row
        model.compile(optimizer, "mse")
        return fit_alone(model, fed("arrays", (tokens, y), batch))

    for name, options, is_cut in (
        ("adam", {}, True),
        ("momentum", {"sparse_as_dense": True, "bucket_mb": 1e-3}, True),
        ("lamb", {}, False),
    ):
        with messages_of_large_models() as sent:
            both(functools.partial(script, name=name), strategy=dataclasses.replace(SHARD, **options))
        assert (len(sent) > 1) == is_cut, (name, sent)


@case
def positions_in_a_table_in_parts() -> None:
    x = np.random.default_rng(0).integers(0, 9, size=(2 * size() * BATCH + 3, 6))
    y = np.random.default_rng(1).normal(size=(len(x), 1))

    def script(batch: int) -> dict[str, Any]:
        model = a_model_with_positions(POSITIONS["known"], keras.optimizers.Adam(0.01))
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script, strategy=SHARD)


@case
def weights_of_one_shape_that_are_whole_at_several_ranks() -> None:
    """Each rank has all of some and nothing of others: TensorFlow took an empty slice of one for all of another."""
    generator = np.random.default_rng(0)
    n = 2 * size() * BATCH
    x, y = generator.normal(size=(n, 8)), generator.normal(size=(n, 8))

    def script(batch: int) -> dict[str, Any]:
        layers = [keras.layers.Dense(8, "tanh") for _ in range(2 * size())]
        model = keras.Sequential([keras.Input((8,)), *layers])
        fidelity.deterministic_weights(model)
        model.compile(ALL_OPTIMIZERS["lamb"](), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    with messages_of_large_models():
        both(script, strategy=SHARD)


@case
def gradients_of_16_bits_in_parts() -> None:
    """Near what they are in full, not equal, and to the bit the same on all ranks."""
    x, y = fidelity.sequences()

    def script(batch: int) -> dict[str, Any]:
        model = fidelity.sequence_model()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    plain = fidelity.of_the_chief(lambda: script(size() * BATCH))
    engine = open_engine(kdist.cluster_info())
    for compression, is_large in (("fp16", True), ("bf16", True), ("bf16", False)):
        fresh()
        sending = messages_of_large_models() if is_large else contextlib.nullcontext([])
        strategy = dataclasses.replace(SHARD, compression=compression)
        with sending as sent, kdist.scope(strategy, scale_lr=None):
            ours = script(BATCH)
        assert bool(sent) == is_large
        weights = [each.tolist() for each in ours["weights"]]
        assert all(theirs == weights for theirs in engine.gather_objects(weights))
        error = max(
            float(np.max(np.abs(one - other)) / np.max(np.abs(one)))
            for one, other in zip(plain["weights"], ours["weights"], strict=True)
        )
        assert 1e-7 < error < 2 * 2.0 ** -{"fp16": 11, "bf16": 8}[compression], (compression, error)


@case
def weights_travel_with_their_update() -> None:
    """Not in steps that accumulate gradients, unless averages take the weights' place there."""
    engine = open_engine(kdist.cluster_info())
    allgather = engine.allgather
    for options, expected in (({}, 2), ({"use_ema": True, "ema_overwrite_frequency": 2}, 7)):
        sent: list[int] = []

        def noted(tensors: Any, lengths: Any = None, sent: list[int] = sent) -> Any:
            if lengths is not None and not tf.executing_eagerly():
                tf.py_function(lambda: sent.append(len(tensors)), [], [])
            return allgather(tensors, lengths)

        fresh()
        with kdist.scope(SHARD, scale_lr=None):
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, **options), "mse")
            engine.__dict__["allgather"] = noted
            try:
                x, y = np.ones((7 * BATCH * size(), 5)), np.ones((7 * BATCH * size(), 2))
                model.fit(x, y, batch_size=BATCH, verbose=0)
            finally:
                del engine.__dict__["allgather"]
        assert sent == [4] * expected, (options, sent)


@case
def each_weight_is_gathered_before_parts_of_the_next_are_loaded() -> None:
    """With decay, and a loss scale; with averages of weights, which Keras makes of all of them, parts are there."""
    engine, load, done = open_engine(kdist.cluster_info()), Part.load, []
    allgather = engine.allgather
    in_turn = ["load", "gather"] * 6
    made: dict[str, tuple[Callable[[], keras.optimizers.Optimizer], list[str]]] = {
        "decay": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1), in_turn),
        "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), in_turn),
        "averages": (lambda: keras.optimizers.SGD(0.01, use_ema=True), ["load"] * 6 + ["gather"] * 6),
    }

    def load_noted(part: Part) -> None:
        if tf.inside_function():
            done.append("load")
        load(part)

    def gather_noted(tensors: Any, lengths: Any = None) -> Any:
        if lengths is not None and not tf.executing_eagerly():
            done.append("gather")
        return allgather(tensors, lengths)

    for name, (make, expected) in made.items():
        fresh()
        with messages_of_large_models(), kdist.scope(SHARD, scale_lr=None):
            layers = [keras.layers.Dense(16, use_bias=False) for _ in range(6)]
            model = keras.Sequential([keras.Input((16,)), *layers])
            model.compile(make(), "mse")
            engine.__dict__["allgather"] = gather_noted
            try:
                x = np.ones((2 * BATCH * size(), 16))
                with mock.patch.object(Part, "load", load_noted):
                    model.fit(x, x, batch_size=BATCH, verbose=0)
            finally:
                del engine.__dict__["allgather"]
        assert done == expected, (name, done)
        done.clear()


@case
def a_layer_that_sets_a_weight() -> None:
    """In data of unknown length: the weight that it sets is whole on every rank."""

    class Halving(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 2), initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.kernel.assign(self.kernel * 0.5)
            return x @ self.kernel

    def run(strategy: kdist.AllReduce) -> dict[str, Any]:
        fresh()
        with kdist.scope(strategy):
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6), Halving()])
            fidelity.deterministic_weights(model)
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return fit_alone(model, fed("tf_data_unknown", rows("ragged"), BATCH))

    compare(run(kdist.AllReduce()), run(SHARD))


class Copying(keras.optimizers.SGD):
    """A rule with copies of the first weights, as of ScheduleFreeAdamW."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.first = [self.add_variable_from_reference(each, "first") for each in variables]
        for copied, each in zip(self.first, variables, strict=True):
            copied.assign(each)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        first = self.first[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, gradient.dtype)
        variable.assign(variable - rate * (gradient + 0.1 * (variable - first)))


@case
def a_rule_that_copies_weights() -> None:
    """Those of the chief, who alone has set them."""
    made = [Copying, *filter(None, [getattr(keras.optimizers, "ScheduleFreeAdamW", None)])]
    for make in made:

        def script(batch: int, make: Any = make) -> dict[str, Any]:
            model = mlp()
            model.compile(make(0.01), "mse")
            if kdist.is_chief():
                model.set_weights([each + 0.5 for each in model.get_weights()])
            if not tf.distribute.has_strategy():  # in a graph's first trace, where Keras loses the copies
                model.optimizer.build(model.trainable_variables)
            x, y = rows("ragged")
            return outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0))

        both(script, strategy=SHARD)


class Centered(keras.optimizers.SGD):
    """Gradient centralization: of each row of a gradient, its mean is taken away."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(gradient.shape) > 1:
            gradient = gradient - keras.ops.mean(gradient, axis=1, keepdims=True)
        super().update_step(gradient, variable, learning_rate)


@case
def a_rule_that_takes_means_of_rows() -> None:
    """TensorFlow 2.21's optimizer of graphs took each number for the mean of its row, and the weight stayed."""
    x, y = rows("ragged")

    for options in ({}, {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}):

        def script(batch: int, options: Any = options) -> dict[str, Any]:
            model = mlp()
            model.compile(Centered(0.05, **options), "mse")
            return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

        both(script, strategy=SHARD)


class ClippedChanges(keras.optimizers.Adam):
    """Clips what is subtracted from a weight by its norm, and lets biases not decay."""

    def assign_sub(self, variable: Any, value: Any) -> None:
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(value)))
        super().assign_sub(variable, value * keras.ops.minimum(1.0, 0.005 / norm))

    def _use_weight_decay(self, variable: Any) -> bool:
        return len(variable.shape) > 1


@case
def methods_of_ones_own_that_see_a_weight() -> None:
    """Each has all of it, at one rank."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(ClippedChanges(0.01, weight_decay=0.2), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script, strategy=SHARD)


@case
def slots_take_their_part_of_the_memory() -> None:
    fresh()
    with kdist.scope(SHARD):
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(96), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.fit(np.zeros((8, 64)), np.zeros((8, 2)), batch_size=BATCH, verbose=0)
    slots = [each for each in model.optimizer.variables if each.name not in ("iteration", "learning_rate")]
    numbers = sum(math.prod(each.shape) for each in slots)
    whole = 2 * model.count_params()
    assert len(slots) == 8
    a_row_of_each = 2 * (96 + 1 + 2 + 1)  # parts are whole rows, and 3 ranks do not divide 64
    assert abs(numbers - whole / size()) <= a_row_of_each, (numbers, whole)
    in_memory = sum(raw_variable(each).read_value().shape.num_elements() for each in slots)
    assert in_memory == numbers


@case
def plans_count_whole_slots() -> None:
    """Of an optimizer that is built in parts, too; and a rank may plan alone."""
    x, y = np.zeros((8, 5)), np.zeros((8, 2))
    made = {
        "adam": ALL_OPTIMIZERS["adam"],
        "adafactor": ALL_OPTIMIZERS["adafactor"],  # slots of other shapes than their weights
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    }

    def compiled(make: Callable[[], keras.optimizers.Optimizer]) -> keras.Model:
        model = mlp()
        model.compile(make(), "mse")
        return model

    def planned(model: keras.Model) -> list[int]:
        sizes = kdist.plan(model, batch_size=BATCH, ranks=size()).sizes
        return [sizes.weights, sizes.trained, sizes.slots]

    for name, make in made.items():
        fresh()
        expected = planned(compiled(make))
        with kdist.scope(SHARD):
            model = compiled(make)
            assert not kdist.is_chief() or planned(model) == expected, name
            model.fit(x, y, batch_size=BATCH, verbose=0)
            assert not kdist.is_chief() or planned(model) == expected, name


@case
def a_part_that_a_script_reads_is_an_error() -> None:
    fresh()
    with kdist.scope(SHARD):
        model = trained(keras.optimizers.Adam(0.01))
    slot = model.optimizer.variables[-1]
    reads = (
        *(slot.numpy, lambda: np.asarray(slot), lambda: float(tf.norm(slot)), lambda: keras.ops.sum(slot)),
        *(lambda: slot * 2.0, lambda: slot + slot, lambda: slot[0], lambda: tf.convert_to_tensor(slot)),
        lambda: keras.ops.convert_to_numpy(slot),
    )
    for read in reads:
        assert "This rank holds a part" in message_of(read)
    assert "in parts" in repr(slot)


@case
def files_of_tensorflow_are_refused() -> None:
    """They would have one rank's parts for those of all; written and read, by a rank alone, too."""
    fresh()
    path = str(shared_folder() / f"plain-{kdist.rank()}")
    plain = trained(keras.optimizers.Adam(0.01))
    tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).write(path)
    with kdist.scope(SHARD):
        model = trained(keras.optimizers.Adam(0.01))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        runs = (
            lambda: checkpoint.write(f"{path}-in-parts"),
            lambda: checkpoint.read(path),
            lambda: tf.saved_model.save(model, f"{path}-served"),  # which could not be loaded
        )
        for run in runs:
            said = message_of(run)
            assert re.search(r"tf.train.Checkpoint.*Received: .*Fix: model.save", said), said
        model.export(f"{path}-served", verbose=False)


@case
def files_are_plain_and_load_in_parts() -> None:
    """Saved outside of and in callbacks; one process that loads them goes on as one that never stopped."""
    folder = shared_folder()
    fresh()
    x, y = rows("ragged")
    for name, make in {"adam": ALL_OPTIMIZERS["adam"], "adafactor": ALL_OPTIMIZERS["adafactor"]}.items():
        one, two = folder / f"{name}.keras", folder / name / "made by the chief" / "in-a-callback.keras"
        weights = folder / f"{name}.weights.h5"
        with kdist.scope(SHARD, scale_lr=None):
            with (
                contextlib.nullcontext()
                if kdist.is_chief()
                else mock.patch("keras.src.utils.file_utils.makedirs", None)
            ):
                model = trained(make(), callbacks=[keras.callbacks.ModelCheckpoint(two)])
            model.save(one)
            model.save_weights(weights)
            kdist.barrier()
            expected = [*map(np.asarray, model.weights), *state_of(model.optimizer)]
            loaded = keras.models.load_model(two)
            assert all(map(np.array_equal, expected, [*map(np.asarray, loaded.weights), *state_of(loaded.optimizer)]))
            loaded.optimizer.load_own_variables({str(n): each * 0 for n, each in enumerate(state_of(model.optimizer))})
            turned = {str(n): each.T for n, each in enumerate(state_of(model.optimizer))}
            with pytest.raises(ValueError, match=r"a value of shape \(.*Expected the shape of its weight"):
                loaded.optimizer.load_own_variables(turned)
            loaded.load_weights(weights)
            assert all(map(np.array_equal, expected, [*map(np.asarray, loaded.weights), *state_of(loaded.optimizer)]))
            history = loaded.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        plain = keras.models.load_model(one)
        after = plain.fit(x, y, batch_size=size() * BATCH, shuffle=False, verbose=0)
        compare(outcome(plain, after), outcome(loaded, history))


@case
def a_weight_of_one_number_is_saved_as_one() -> None:
    """Its slots, too, where one rank has all of it; and the chief alone decides what a `ModelCheckpoint` saves."""

    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.factor

    class Kept(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            state = [*map(np.asarray, self.model.weights), *state_of(self.model.optimizer)]
            self.first = state if epoch == 0 else self.first

    def made() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), Scale()])
        fidelity.deterministic_weights(model)
        return model

    def score(epoch: int, logs: dict[str, Any]) -> None:
        if kdist.is_chief():
            logs["score"] = -epoch  # the first epoch is the best

    folder = shared_folder()
    fresh()
    for name in ("lamb", "adam"):
        path = folder / f"{name}.weights.h5"
        saving = keras.callbacks.ModelCheckpoint(path, "score", mode="max", save_best_only=True, save_weights_only=True)
        keeping = Kept()
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=score), keeping, saving]
        with kdist.scope(SHARD, scale_lr=None):
            trained(ALL_OPTIMIZERS[name](), made, epochs=3, callbacks=callbacks)
            kdist.barrier()
        plain = trained(ALL_OPTIMIZERS[name](), made)
        plain.load_weights(path)
        for one, other in zip([*plain.weights, *plain.optimizer.variables], keeping.first, strict=True):
            assert one.shape == other.shape
            np.testing.assert_array_equal(np.asarray(one), other)


@case
def an_interrupted_training_goes_on() -> None:
    """Bit for bit on the same number of ranks; a backup of parts is that of a training without them."""

    class Interrupted(Exception):
        pass

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise Interrupted

    def run(strategy: kdist.AllReduce, backup: Path | None, *callbacks: Any) -> dict[str, Any]:
        fresh()
        with kdist.scope(strategy, scale_lr=None):
            backups = [] if backup is None else [kdist.callbacks.BackupAndRestore(str(backup), save_freq=2)]
            model = mlp()
            model.compile(keras.optimizers.Adam(0.01), "mse")
            x, y = rows("ragged")
            history = model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=[*backups, *callbacks])
        return {**outcome(model), "loss": history.history["loss"][-1]}

    uninterrupted = run(SHARD, None)
    for then in (SHARD, kdist.AllReduce()):
        folder = shared_folder()
        with contextlib.suppress(Interrupted):
            run(SHARD, folder, Interruption())
        compare(uninterrupted, run(then, folder), rtol=0.0 if then is SHARD else 1e-9)


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except KDistError as error:
        return str(error)
    raise AssertionError("nothing was raised")


class _OwnApply(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(grads, trainable_variables)


class _OwnUpdateStep(keras.optimizers.SGD):
    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        return super()._backend_update_step(grads, trainable_variables, learning_rate)


class _OwnAverages(keras.optimizers.SGD):
    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        super()._update_model_variables_moving_average(trainable_variables)


class _OwnSaving(keras.optimizers.SGD):
    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)


class _SharedState(keras.optimizers.SGD):
    """A rule with a number that all weights add to, as of Prodigy."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.distance = self.add_variable(shape=(), name="distance")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.distance.assign_add(keras.ops.cast(keras.ops.sum(keras.ops.abs(gradient)), self.distance.dtype))
        variable.assign_sub(gradient * keras.ops.cast(self.distance, gradient.dtype))


class _OwnBackup(keras.callbacks.BackupAndRestore):
    pass


class _Orbax(getattr(keras.callbacks, "OrbaxCheckpoint", _OwnBackup)):
    def __init__(self) -> None:  # without the package, which a refusal does not need
        keras.callbacks.Callback.__init__(self)


@case
def what_is_refused() -> None:
    """Each before the first step, with a fix."""
    fresh()
    built = keras.optimizers.SGD(0.1)
    built.build(mlp().trainable_variables)

    def several() -> keras.optimizers.Optimizer:
        return keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1))

    def loop() -> None:
        model, optimizer = mlp(), keras.optimizers.SGD(0.1)
        optimizer.apply([tf.zeros(each.shape) for each in model.trainable_variables], model.trainable_variables)

    def of_another_scope() -> None:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.zeros((8, 5)), np.zeros((8, 2)), batch_size=BATCH, verbose=0)

    def unfrozen() -> None:
        again = mlp()
        again.layers[0].trainable = False
        again.compile(keras.optimizers.Adam(0.1), "mse")
        again.fit(np.zeros((8, 5)), np.zeros((8, 2)), batch_size=BATCH, verbose=0)
        again.layers[0].trainable = True
        again.compile(again.optimizer, "mse")
        again.fit(np.zeros((8, 5)), np.zeros((8, 2)), batch_size=BATCH, verbose=0)

    def of_8_bits() -> None:
        keras.config.set_floatx("float32")
        try:
            made = mlp()
            made.quantize("float8")
            made.compile(keras.optimizers.SGD(0.1), "mse")
            made.fit(*rows("even"), verbose=0)
        finally:
            keras.config.set_floatx("float64")

    def kept_by_each_rank() -> None:
        class Kept(keras.layers.Layer):
            def build(self, shape: Any) -> None:
                self.scale = keras.Variable(np.ones(shape[-1]), synchronization="on_read")

            def call(self, x: Any) -> Any:
                return x * self.scale

        trained(keras.optimizers.SGD(0.1), lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), Kept()]))

    with kdist.scope():
        model = mlp()
    refused = {
        "float8": of_8_bits,
        'synchronization="on_read"': kept_by_each_rank,
        "ReplicaCheck": lambda: trained(keras.optimizers.SGD(0.1), callbacks=[kdist.callbacks.ReplicaCheck()]),
        "TensorBoard(embeddings_freq": lambda: trained(
            keras.optimizers.SGD(0.1), callbacks=[keras.callbacks.TensorBoard(str(shared_folder()), embeddings_freq=1)]
        ),
        "its own save_own_variables": lambda: trained(_OwnSaving(0.1)),
        "state that all weights share": lambda: trained(_SharedState(0.1)),
        "SwapEMAWeights": lambda: trained(
            keras.optimizers.Adam(0.1, use_ema=True), callbacks=[keras.callbacks.SwapEMAWeights()]
        ),
        "of another scope": of_another_scope,
        "built with other weights": unfrozen,
        "its own apply": lambda: trained(_OwnApply(0.1)),
        "its own _backend_update_step": lambda: trained(_OwnUpdateStep(0.1)),
        "its own _update_model_variables_moving_average": lambda: trained(_OwnAverages(0.1)),
        "of several": lambda: trained(several()),
        "built outside of the scope": lambda: trained(built),
        "loop of the script's own": loop,
        "NaNPolicy": lambda: trained(keras.optimizers.SGD(0.1), callbacks=[kdist.callbacks.NaNPolicy()]),
        "a _OwnBackup, by Keras": lambda: trained(
            keras.optimizers.SGD(0.1), callbacks=[_OwnBackup(str(shared_folder()))]
        ),
        "a _Orbax, by Keras": lambda: trained(keras.optimizers.SGD(0.1), callbacks=[_Orbax()]),
        "HDF5": lambda: trained(keras.optimizers.SGD(0.1)).save(shared_folder() / "model.h5"),
    }
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        del refused["of several"]
    for words, run in refused.items():
        with kdist.scope(SHARD):
            said = message_of(run)
        assert words in said, said
        assert re.search(r"Fix: .", said), said


@case
def a_file_that_one_rank_loads_is_refused() -> None:
    """And one that differs between the ranks."""
    fresh()
    with kdist.scope(SHARD):
        model = trained(keras.optimizers.Adam(0.01))
        state = {str(place): each for place, each in enumerate(state_of(model.optimizer))}
        if kdist.is_chief():
            model.optimizer.load_own_variables(state)
        x, y = rows("ragged")
        said = message_of(lambda: model.fit(x, y, batch_size=BATCH, verbose=0))
        assert "files loaded into Adam" in said, said
        model.optimizer.load_own_variables(state)
        if not kdist.is_chief():
            model.optimizer.load_own_variables(state)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        model.optimizer.load_own_variables({name: each + kdist.rank() for name, each in state.items()})
        said = message_of(lambda: model.fit(x, y, batch_size=BATCH, verbose=0))
        assert "checksum of slots loaded into Adam" in said, said
        again = trained(keras.optimizers.Adam(0.01))
        path = shared_folder() / "saved.weights.h5"
        again.save_weights(path)
        kdist.barrier()

        def load(epoch: int, logs: Any) -> None:
            if kdist.is_chief():
                again.load_weights(path)

        loading = keras.callbacks.LambdaCallback(on_epoch_end=load)
        said = message_of(lambda: again.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[loading]))
    assert "files loaded into Adam" in said, said


@case
def a_rank_that_saves_alone_is_told() -> None:
    fresh()
    x, y = rows("ragged")
    path = shared_folder() / "saved.keras"
    with kdist.scope(SHARD):
        model = trained(keras.optimizers.Adam(0.01))
        saves = {
            "a model with state in parts.*": lambda: model.save(path),
            "state in parts": lambda: model.optimizer.save_own_variables({}),
        }
        for what, save in saves.items():
            said = message_of(lambda save=save: save() if kdist.is_chief() else model.fit(x, y, verbose=0))
            assert re.search(f"save of {what} on rank 0, .*, and .*fit.*Fix: .*a branch on the rank", said), said
    assert not path.exists()


@case
def messages_do_not_depend_on_a_ranks_number_of_slices() -> None:
    """An eager step knows its rows: of these, the last step has more on one rank than on another."""
    ids = np.arange(((size() + 1) * BATCH + 1) * 3).reshape(-1, 3) % 7
    y = np.sin(ids.sum(axis=1, keepdims=True))

    def script(batch: int) -> dict[str, Any]:
        layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        fidelity.deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
        data = tf.data.Dataset.from_tensor_slices((ids, y)).batch(batch)
        return outcome(model, model.fit(data, epochs=2, verbose=0))

    dense, slices = 8 * (12 * 8 + 8 + 8 + 1), 8 * 3 * 4 * BATCH  # bytes
    for limit in (dense, dense + slices):
        with messages_of_large_models() as sent, mock.patch.object(gradients, "SMALL_BYTES", limit):
            both(script, strategy=dataclasses.replace(SHARD, bucket_mb=1.0))
        assert bool(sent) == (limit == dense), sent


@case
def options_that_exclude_each_other() -> None:
    for options in ({"compression": "powersgd"}, {"compression": "topk"}, {"sync_every": 2}, {"shard": "model"}):
        assert "shard=" in message_of(lambda options=options: kdist.AllReduce(**{"shard": "optimizer", **options}))


SHARDED = {
    **CASES,
    **{
        name: sharded(each)
        for name, each in FEATURES.items()
        if each.__module__.rpartition(".")[2] not in _OTHER_TOPICS and name not in _OTHERS
    },
    **{name: sharded(each) for name, each in fidelity.MATRIX.items()},
}
