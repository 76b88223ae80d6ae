"""Compressed gradients: 16 bits, PowerSGD, top-k."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

import kdist
from kdist._engine import open_engine
from kdist.engines.single import SingleEngine
from kdist.errors import StrategyError
from kdist.gradients import top_k as top_k_module
from kdist.gradients.power_sgd import PowerSGD
from kdist.gradients.reducer import GradientReducer
from tests.helpers.logs import logged
from tests.training.features.optimizers import _two_optimizers
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fresh,
    mlp,
    of_the_chief,
    outcome,
    rows,
    sequence_model,
    sequences,
    size,
)


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
        self.reducer = GradientReducer(SingleEngine(), compression=PowerSGD(1))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        sums, _ = self.reducer.sum(list(grads), [], variables=variables)
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
