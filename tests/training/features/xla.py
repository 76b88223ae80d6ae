"""`jit_compile=True`."""

from __future__ import annotations

from typing import Any

import keras

import kdist
from kdist.engines.single import SingleEngine
from tests.helpers.logs import logged
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    OwnStep,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    mlp,
    outcome,
    rows,
    sequence_model,
    sequences,
)


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

    reasons = ["its losses, metrics or layers send messages before", "a train_step of its own", "callbacks change its"]
    with logged() as said:
        simple(lambda: {"jit_compile": True}, model=normalised, rtol=1e-7)
        both(masked, rtol=1e-9 if keras.__version__ >= "3.13" else 1e-6)
        both(own_step)
        both(watched)
    told = [sum(reason in each for each in said) for reason in reasons]
    assert told == ([2, 1, 1] if kdist.is_chief() else [0, 0, 0]), said
