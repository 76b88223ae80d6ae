"""What relates rows, given to a compiled loss or to a metric by a step of the user's own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import kdist
from kdist._engine import open_engine
from tests.helpers.logs import logged
from tests.training.features.own_losses import NO_MEAN, OF_RANK, silently_both
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, mlp, outcome, rows


def places(pairs: Any) -> Any:
    return ops.arange(ops.shape(pairs)[0])


def similarities(one: Any, other: Any) -> Any:
    return 3 * ops.matmul(ops.tanh(one), ops.transpose(ops.tanh(other)))


class Embeds(keras.Model):
    """The model of Keras' example of metric learning: each row is to be found among those of the batch."""

    def __init__(self, *counts: keras.metrics.Metric, is_called: bool = False) -> None:
        super().__init__()
        self.net, self.counts, self.is_called = mlp(), list(counts), is_called

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def pairs(self, x: Any, y: Any, **training: bool) -> Any:
        return similarities(self(x, **training), y)

    def loss_of(self, pairs: Any) -> Any:
        return self.compute_loss(y=places(pairs), y_pred=pairs)

    def measure(self, loss: Any, pairs: Any) -> dict[str, Any]:
        for each in self.metrics:
            if each.name == "loss":
                each.update_state(loss)
            elif self.is_called:
                each(places(pairs), pairs)
            else:
                each.update_state(places(pairs), pairs)
        return {each.name: each.result() for each in self.metrics}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            pairs = self.pairs(x, y, training=True)
            loss = self.loss_of(pairs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.measure(loss, pairs)

    def test_step(self, data: Any) -> dict[str, Any]:
        pairs = self.pairs(*data[:2])
        return self.measure(self.loss_of(pairs), pairs)


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def compiled(make: Callable[[], keras.Model], name: str = "ragged", **arguments: Any) -> Callable[[int], dict]:
    x, y = rows(name)

    def script(batch: int) -> dict[str, Any]:
        model = make()
        model.compile(keras.optimizers.SGD(0.01), **{"loss": crossentropy(), **arguments})
        validation = {"validation_data": (x, y), "validation_batch_size": batch}
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, **validation))

    return script


class Nearest(keras.metrics.Metric):
    """The mean over steps of the largest similarity, whose states do not add up."""

    def __init__(self) -> None:
        super().__init__(name="nearest")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.steps = self.add_weight(name="steps", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.max(y_pred + 0.1 * ops.cast(y_true, y_pred.dtype)))
        self.steps.assign_add(1)

    def result(self) -> Any:
        return self.total / self.steps


class Rows(Embeds):
    """Passes a loss for each row, of which each is of all, to a metric; a function computes the pairs."""

    @tf.function
    def of_rows(self, pairs: Any) -> Any:
        return ops.logsumexp(pairs, axis=1) - ops.diagonal(pairs)

    def measure(self, loss: Any, pairs: Any) -> dict[str, Any]:
        for each in self.metrics:
            each.update_state(loss if each.name == "loss" else self.of_rows(pairs))
        return {each.name: each.result() for each in self.metrics}


def of_pairs(places: Any, pairs: Any) -> Any:
    return ops.max(pairs, axis=1) - ops.diagonal(pairs) + 0.01 * ops.cast(places, pairs.dtype)


@feature
def pairs_of_rows_for_compiled_losses_and_metrics() -> None:
    """Each rank gathers the rows; a metric whose states add up counts the pairs once."""
    silently_both(compiled(Embeds, metrics=["accuracy"]))
    found = keras.metrics.SparseCategoricalAccuracy
    silently_both(
        compiled(lambda: Embeds(found(name="found"), Nearest(), is_called=True), "even", loss=crossentropy("sum"))
    )

    silently_both(compiled(lambda: Rows(keras.metrics.Mean(name="of_rows")), loss=of_pairs))


@feature
def weighted_pairs_of_rows_for_compiled_losses() -> None:
    class Weighs(Embeds):
        def loss_of(self, pairs: Any) -> Any:
            weight = 1 + ops.mean(ops.abs(pairs), axis=1)
            return self.compute_loss(y=places(pairs), y_pred=pairs, sample_weight=weight)

    silently_both(compiled(Weighs))
    silently_both(compiled(Weighs, loss=of_pairs, jit_compile=False))


def centered(rows: Any) -> Any:
    return rows - ops.mean(rows, axis=0)


GIVEN: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "beside targets as they are": lambda y, p: (y, centered(p)),
    "of normalized targets": lambda y, p: (centered(y) / (1 + ops.std(y, axis=0)), p),
    "what needs three rows": lambda y, p: (0 * y[:, :1], ops.top_k(similarities(p, y), 3)[0][:, 1:2]),
    "of a known shape": lambda y, p: (ops.eye(2), ops.matmul(ops.transpose(ops.tanh(p)), y) / 10),
    "of one dimension": lambda y, p: (y[:, 0], ops.flip(p[:, 0], axis=0)),
}


@feature
def other_values_that_relate_rows_for_compiled_losses_and_metrics() -> None:
    class Gives(Embeds):
        def __init__(self, what: str) -> None:
            super().__init__(keras.metrics.MeanSquaredError(name="squared"), keras.metrics.Mean(name="mean"))
            self.what = GIVEN[what]

        def pairs(self, x: Any, y: Any, **training: bool) -> Any:
            return self.what(y, self(x, **training))

        def loss_of(self, pairs: Any) -> Any:
            return self.compute_loss(y=pairs[0], y_pred=pairs[1])

        def measure(self, loss: Any, pairs: Any) -> dict[str, Any]:
            self.counts[0].update_state(*pairs)
            self.counts[1].update_state(pairs[1])
            return {**{each.name: each.result() for each in self.counts}, "last": loss}

    for what in GIVEN:
        try:
            silently_both(compiled(lambda what=what: Gives(what), loss="mse"))
        except AssertionError as error:
            raise AssertionError(what) from error


@contextlib.contextmanager
def gatherings() -> Iterator[list[Any]]:
    """Yields a list to which each message is added in which a step gathers rows."""
    engine, found = open_engine(kdist.cluster_info()), []
    allgather = engine.allgather

    def noted(tensors: Any, lengths: Any = None) -> Any:  # with lengths: parts of weights
        found.extend([] if tf.executing_eagerly() or lengths is not None else tensors)
        return allgather(tensors, lengths)

    engine.__dict__["allgather"] = noted
    try:
        yield found
    finally:
        del engine.__dict__["allgather"]


@feature
def rows_in_another_order_for_compiled_losses_and_metrics() -> None:
    """A discriminator's, of real and made rows together: nothing is gathered."""

    class Discriminates(keras.Sequential):
        def both(self, x: Any, **training: bool) -> tuple[Any, Any]:
            count = ops.shape(x)[0]
            labels = ops.concatenate([ops.zeros((count, 1)), ops.ones((count, 1))])
            return labels, self(ops.concatenate([x, 0.5 * ops.tanh(x)]), **training)

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                labels, predictions = self.both(data[0], training=True)
                loss = self.compute_loss(y=labels, y_pred=predictions)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.compute_metrics(data[0], labels, predictions)

        def test_step(self, data: Any) -> dict[str, Any]:
            labels, predictions = self.both(data[0])
            self.compute_loss(y=labels, y_pred=predictions)
            return self.compute_metrics(data[0], labels, predictions)

    def made() -> keras.Model:
        dense = keras.layers.Dense
        return Discriminates([dense(4, activation="tanh"), dense(1, activation="sigmoid")])

    arguments = {"loss": "binary_crossentropy", "metrics": ["accuracy", keras.metrics.Precision(name="precision")]}
    with gatherings() as found:
        silently_both(compiled(made, **arguments))
    assert not found


@feature
def pairs_that_cannot_be_computed_for_all_ranks_are_told_of() -> None:
    """A loss and a metric are named that are given what a function computes that has a variable."""

    class Warm(Embeds):
        def build(self, shape: Any) -> None:
            self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
            self.net.build(shape)

        @tf.function
        def warm(self, pairs: Any) -> Any:
            return pairs * self.temperature

        def pairs(self, x: Any, y: Any, **training: bool) -> Any:
            return self.warm(super().pairs(x, y, **training))

    x, y = rows("even")
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        model = Warm(keras.metrics.SparseCategoricalAccuracy(name="found"))
        model.compile(keras.optimizers.SGD(0.01), crossentropy())
        model.fit(x, y, batch_size=BATCH, verbose=0)
    found = [text.partition(" is ")[0] for text in said if any(each in text for each in (NO_MEAN, OF_RANK))]
    expected = ["The loss that the step of Warm differentiates", "The metric 'found'"]
    assert found == (expected if kdist.rank() == 0 else []), said
