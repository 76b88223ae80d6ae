"""Random steps that give rows to a compiled loss and to metrics, and use gradients: N ranks against one process.

Rows go through operations of which some relate them; the loss and the metrics are Keras' own. The step applies its
gradients as they are, or what it makes of them. A case is three examples; nothing may be reported.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from hypothesis import strategies as st

from tests.training.features.own_gradients import USES
from tests.training.features.own_losses import silently_both
from tests.training.features.pairs import compiled
from tests.training.fidelity import mlp
from tests.training.random_losses import OF_ROWS, SOURCES
from tests.training.random_programs import case

NUM_CASES = 30


class Gives(keras.Model):
    """Takes random ways from its outputs to the loss, and from gradients to the update."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.drawn = mlp(), drawn
        self.counts = [keras.metrics.MeanSquaredError(name="squared"), keras.metrics.Mean(name="mean")]

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def rows(self, y: Any, p: Any) -> Any:
        x = SOURCES[self.drawn["source"]](y, p)
        for step in self.drawn["steps"]:
            x = OF_ROWS[step](x)
        return x

    def measured(self, given: Any, loss: Any) -> dict[str, Any]:
        self.counts[0].update_state(0 * given, given)
        self.counts[1].update_state(given)
        return {**{each.name: each.result() for each in self.counts}, "last": loss}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            given = self.rows(y, self(x, training=True))
            loss = scaled = self.compute_loss(y=0 * given, y_pred=given)
            if self.drawn["scales"]:
                scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        use = USES.get(self.drawn["use"], lambda gradients: gradients)
        self.optimizer.apply_gradients(zip(use(gradients), self.trainable_variables, strict=True))
        return {**self.measured(given, loss), "norm": norm}

    def test_step(self, data: Any) -> dict[str, Any]:
        given = self.rows(data[1], self(data[0]))
        return self.measured(given, self.compute_loss(y=0 * given, y_pred=given))


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "source": draw(st.sampled_from(["differences", "outputs"])),
        "steps": draw(st.lists(st.sampled_from(sorted(OF_ROWS)), max_size=2)),
        "use": draw(st.sampled_from(["as they are", *sorted(set(USES) - {"signs"})])),  # a sign may be of rounding
        "scales": draw(st.booleans()),
        "shape": draw(st.sampled_from(["even", "ragged", "one short"])),
    }


def compare(drawn: dict[str, Any]) -> None:
    silently_both(compiled(lambda: Gives(drawn), drawn["shape"], loss="mse"))


RANDOM_STEPS = {f"random_steps_{number}": case(number, steps(), compare) for number in range(NUM_CASES)}
