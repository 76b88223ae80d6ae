"""N ranks against one process on the same global batches: the same script, run twice in every rank, must give the same.

A script gets the rows of one user batch: N times as many in the plain run. What it returns is compared: weights,
optimizer variables, history, evaluation and prediction, in float64.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist._engine import open_engine

BATCH = 4
RTOL = 1e-9


def size() -> int:
    return kdist.size()


# Data.


def num_rows(shape: str) -> int:
    ranks = size()
    return {
        "even": 3 * ranks * BATCH,
        "ragged": 2 * ranks * BATCH + BATCH + 1,
        "one short": 2 * ranks * BATCH - 1,  # the last batch is ragged on one rank alone
        "few": max(1, ranks - 1),
    }[shape]


def rows(shape: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    n = num_rows(shape)
    x = generator.normal(size=(n, 5))
    y = x @ generator.normal(size=(5, 2)) + 0.1 * generator.normal(size=(n, 2))
    return x, y


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays: tuple[np.ndarray, ...], batch: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arrays, self.batch = arrays, batch

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.batch)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(a[index * self.batch : (index + 1) * self.batch] for a in self.arrays)


def endless(arrays: tuple[np.ndarray, ...], batch: int) -> Iterator[tuple[np.ndarray, ...]]:
    for start in itertools.cycle(range(0, len(arrays[0]), batch)):
        yield tuple(a[start : start + batch] for a in arrays)


def fed(kind: str, arrays: tuple[np.ndarray, ...], batch: int) -> dict[str, Any]:
    """Returns the arguments of `fit` that feed arrays in order, `batch` rows a step."""
    num_batches = -(-len(arrays[0]) // batch)
    if kind == "arrays":
        names = ("x", "y", "sample_weight")
        return {**dict(zip(names, arrays, strict=False)), "batch_size": batch, "shuffle": False}
    if kind == "tf_data":
        return {"x": tf.data.Dataset.from_tensor_slices(arrays).batch(batch)}
    if kind == "tf_data_unknown":
        return {"x": tf.data.Dataset.from_tensor_slices(arrays).batch(batch).filter(lambda *_: True)}
    if kind == "py_dataset":
        return {"x": Batches(arrays, batch), "shuffle": False}
    if kind == "py_dataset_workers":
        return {"x": Batches(arrays, batch, workers=2), "shuffle": False}
    if kind == "generator":
        return {"x": endless(arrays, batch), "steps_per_epoch": num_batches}
    raise ValueError(kind)


# Models.


def deterministic_weights(model: keras.Model, seed: int = 1) -> None:
    generator = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape) * 0.5)


def mlp(outputs: int = 2, **kwargs: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(outputs, **kwargs)]
    )
    deterministic_weights(model)
    return model


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


def outcome(model: keras.Model, history: Any = None, **more: Any) -> dict[str, Any]:
    """Returns all that two runs must have in common."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "weights": [np.asarray(v) for v in model.weights],
        "optimizer": [] if optimizer is None else state_of(optimizer),
        "history": {} if history is None else history.history,
        **more,
    }


def state_of(optimizer: keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Returns an optimizer's variables as files have them: whole, also where each rank has its part."""
    saved: dict[str, np.ndarray] = {}
    optimizer.save_own_variables(saved)
    return list(saved.values())


def fit_alone(model: keras.Model, data: dict[str, Any], **fit: Any) -> dict[str, Any]:
    return outcome(model, model.fit(**data, epochs=2, verbose=0, **fit))


def fit_evaluate_predict(
    model: keras.Model, data: dict[str, Any], x: Any, y: Any, batch: int, **fit: Any
) -> dict[str, Any]:
    history = model.fit(**data, epochs=2, verbose=0, **fit)
    return outcome(
        model,
        history,
        evaluate=model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True),
        predict=model.predict(x, batch_size=batch, verbose=0),
    )


# Running twice, and comparing.


def both(script: Callable[[int], dict[str, Any]], rtol: float = RTOL, **scope: Any) -> None:
    """Runs a script plainly with the global batch and in the scope with this rank's, and compares on all ranks."""
    plain = of_the_chief(lambda: script(size() * BATCH))
    fresh()
    with kdist.scope(scale_lr=None, **scope):
        ours = script(BATCH)
    compare(plain, ours, rtol)


def of_the_chief(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `run` returns on rank 0, which runs it from a fresh state, on all ranks: they share few cores.

    If it fails there, it fails on all.
    """
    engine = open_engine(kdist.cluster_info())
    with tempfile.NamedTemporaryFile() as file:
        name = Path(engine.broadcast_object(file.name))
        written = Path(f"{name}.written")
        if engine.rank == 0:
            try:
                fresh()
                with every_dependency():
                    pickle.dump(keras.tree.map_structure(np.asarray, run()), file)
                file.flush()
            finally:
                written.touch()
        while not written.exists():  # not in a collective: MPI would burn a core
            time.sleep(0.005)
        content = name.read_bytes()
        assert content, "the plain run failed on rank 0"
        plain = pickle.loads(content)
        engine.barrier()
    return plain


@contextlib.contextmanager
def every_dependency() -> Iterator[None]:
    """Keeps every control dependency of a graph: else plain Keras may update a weight before its step reads that.

    An update waits for the reads before it. Keras passes all gradients through one `IdentityN`, which waits for them
    too. So TensorFlow's dependency optimizer drops that the update does, and then takes the `IdentityN` apart: a weight
    that its own gradient does not need, such as a factor of the loss, is updated as soon as this gradient is known. The
    steps of several ranks have no such `IdentityN`.
    """
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"dependency_optimization": True})  # as by default


def fresh() -> None:
    """Makes both runs begin alike: names, seeds, float64."""
    open_engine(kdist.cluster_info())  # over TensorFlow's collectives: before a variable is made
    keras.utils.clear_session(free_memory=False)  # to collect garbage twice a case took a fifth of the time
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)


def compare(plain: dict[str, Any], ours: dict[str, Any], rtol: float = RTOL) -> None:
    assert plain.keys() == ours.keys()
    for part in plain:
        keras.tree.assert_same_structure(plain[part], ours[part])
        pairs = zip(keras.tree.flatten(plain[part]), keras.tree.flatten(ours[part]), strict=True)
        for number, (one, other) in enumerate(pairs):
            one, other = np.asarray(one), np.asarray(other)
            assert one.shape == other.shape, f"{part}[{number}]: {one.shape} and {other.shape}"
            if one.dtype.kind not in "fc":
                np.testing.assert_array_equal(other, one, err_msg=f"{part}[{number}]")
                continue
            scale = np.max(np.abs(one), initial=0.0)
            np.testing.assert_allclose(other, one, rtol=rtol, atol=rtol * scale + 1e-15, err_msg=f"{part}[{number}]")


# The matrix: optimizer, sizes, kind of input.

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
}
SHAPES = ("even", "ragged", "few")
KINDS = ("arrays", "tf_data", "tf_data_unknown", "py_dataset", "generator")


def cell(optimizer: str, shape: str, kind: str) -> Callable[[], None]:
    def case() -> None:
        x, y = rows(shape)

        def script(batch: int) -> dict[str, Any]:
            model = mlp()
            model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
            if kind != "arrays":  # what is evaluated and predicted is always arrays
                return outcome(model, model.fit(**fed(kind, (x, y), batch), epochs=2, verbose=0))
            return fit_evaluate_predict(model, fed(kind, (x, y), batch), x, y, batch)

        both(script)

    return case


MATRIX = {
    f"{optimizer}-{shape}-{kind}": cell(optimizer, shape, kind)
    for optimizer, shape, kind in itertools.product(OPTIMIZERS, SHAPES, KINDS)
}
