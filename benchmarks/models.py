"""The models that the benchmarks train, for Keras 3 and tf_keras alike, and the random data that they train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

VOCABULARY, LENGTH = 20_000, 64  # of the Transformer's tokens


def mlp(keras: Any) -> Any:
    """109 386 parameters, a step of about a millisecond: what a step costs beside its computation."""
    layers = keras.layers
    hidden = [layers.Dense(width, activation="relu") for width in (128, 64)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])


def cnn(keras: Any) -> Any:
    """1 199 882 parameters, the network of Keras' MNIST example of old: much computation, little to send."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def wide(keras: Any) -> Any:
    """22 099 466 parameters, 88 MB of gradients: much to send."""
    layers = keras.layers
    hidden = [layers.Dense(width, activation="relu") for width in (4096, 4096, 512)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])


def resnet(keras: Any) -> Any:
    """ResNet-20 for 32 x 32 images, of He et al. (2015): many small variables, and batch normalisation."""
    layers = keras.layers

    def normed(x: Any, filters: int, size: int, strides: int) -> Any:
        return layers.BatchNormalization()(layers.Conv2D(filters, size, strides, "same", use_bias=False)(x))

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(normed(inputs, 16, 3, 1))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            inner = layers.ReLU()(normed(x, filters, 3, strides))
            shortcut = normed(x, filters, 1, strides) if strides == 2 else x
            x = layers.ReLU()(layers.Add()([normed(inner, filters, 3, 1), shortcut]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def transformer(keras: Any) -> Any:
    """An embedding and one block of a Transformer: in TensorFlow, the gradient of the embedding is sparse."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 128)(tokens)
    attended = layers.MultiHeadAttention(num_heads=4, key_dim=32)(x, x)
    x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, attended]))
    forward = layers.Dense(128)(layers.Dense(256, activation="relu")(x))
    x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, forward]))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


@dataclasses.dataclass(frozen=True)
class Model:
    """One of the models.

    Attributes:
        title: str, its name in tables.
        build: function of a Keras module that returns the model.
        shape: tuple of int, the shape of one row of its input.
        batch: int, the rows that each rank has in a step.
        steps: int, the steps of an epoch.
    """

    title: str
    build: Callable[[Any], Any]
    shape: tuple[int, ...]
    batch: int
    steps: int


MODELS = {
    "mlp": Model("MLP", mlp, (784,), 64, 150),
    "cnn": Model("CNN", cnn, (28, 28, 1), 64, 8),
    "wide": Model("wide MLP", wide, (784,), 64, 8),
    "resnet": Model("ResNet-20", resnet, (32, 32, 3), 32, 4),
    "transformer": Model("Transformer", transformer, (LENGTH,), 32, 8),
}


def random_data(name: str, num_rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns random rows for a model, and labels of ten classes.

    Args:
        name: str, a key of `MODELS`.
        num_rows: int, how many.
        seed: int, of NumPy's generator.

    Returns:
        Two NumPy arrays: float32 rows (int32 tokens for the Transformer) and int64 labels.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    shape = (num_rows, *MODELS[name].shape)
    if name == "transformer":
        rows: Any = generator.integers(0, VOCABULARY, shape, "int32")
    else:
        rows = generator.random(shape, "float32")
    return rows, generator.integers(0, 10, num_rows)


def compile_model(
    keras: Any, model: Any, wrap: Callable[[Any], Any] = lambda optimizer: optimizer, **options: Any
) -> None:
    """Compiles a model as all benchmarks do: SGD with momentum, cross entropy from logits, accuracy.

    Args:
        keras: module, Keras or tf_keras, whichever the model is of.
        model: the model.
        wrap: function of the optimizer that returns the one to use.
        options: what else `compile` is given.
    """
    model.compile(
        optimizer=wrap(keras.optimizers.SGD(0.01, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
