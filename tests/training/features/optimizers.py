"""What optimizers can do beside their update."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.training.features.registry import feature, simple
from tests.training.fidelity import both, deterministic_weights, outcome, rows, state_of


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
def moving_average_of_weights() -> None:
    simple(lambda: {"optimizer": keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)})


@feature
def schedules() -> None:
    simple(lambda: {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))})


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
def an_optimizer_of_several() -> None:
    """Keras' `MultiOptimizer`, an optimizer for each kind of variable: it trains, unscaled."""

    def several() -> keras.optimizers.Optimizer:
        parts = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(lambda variable: parts["bias" in variable.path])

    simple(lambda: {"optimizer": several(), "metrics": ["mae"]}, all_methods=True)


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
        optimizers = model.generator_optimizer, model.critic_optimizer
        # Not the unused optimizer that `compile` makes: a strategy lets Keras build it.
        return {**outcome(model, history), "optimizer": [state_of(each) for each in optimizers]}

    both(script, **scope)
