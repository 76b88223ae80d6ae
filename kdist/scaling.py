"""Scaling rules: how batch size and learning rate depend on the number of replicas."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TypeGuard

LINEAR_RULE_OPTIMIZERS = frozenset({"SGD"})
"""Optimizers whose step is proportional to the gradient: they use the linear rule (Goyal et al., 2017)."""

SQRT_RULE_OPTIMIZERS = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lamb",
        "Lion",
        "Muon",
        "Nadam",
        "RMSprop",
        "ScheduleFreeAdamW",
    }
)
"""Optimizers that normalise the gradient: they use the square-root rule (Malladi et al., 2022)."""


@dataclasses.dataclass(frozen=True)
class LearningRateRule:
    """The multiplier of the learning rate after warm-up, and its reason.

    Attributes:
        factor: float, the multiplier; 1 leaves the learning rate unchanged.
        name: str, `"linear"`, `"sqrt"`, `"given"` or `"none"`.
        why: str, the reason, for the log.
        is_known: bool, `False` if no rule is known for the optimizer.
    """

    factor: float
    name: str
    why: str
    is_known: bool = True


def is_learning_rate_scale(value: object) -> bool:
    """Returns whether a value is a valid `scale_lr` of `learning_rate_rule`."""
    if isinstance(value, str):
        return value in ("auto", "linear", "sqrt")
    return value is None or (_is_finite(value) and value > 0)


def is_warmup(value: object) -> bool:
    """Returns whether a value is a valid `warmup_epochs` of `num_warmup_steps`."""
    return value == "auto" if isinstance(value, str) else _is_finite(value) and value >= 0


def _is_finite(value: object) -> TypeGuard[float]:
    # NumPy's numbers are `Real`, too.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def learning_rate_rule(scale_lr: str | float | None, optimizer: str, batches_per_step: int) -> LearningRateRule:
    r"""Chooses the multiplier of the learning rate.

    With a global batch that is $k$ times as large, the linear rule multiplies the learning rate by $k$, the
    square-root rule by $\sqrt{k}$.

    Args:
        scale_lr: `"auto"` (by optimizer), `"linear"`, `"sqrt"`, a positive number, or `None`.
        optimizer: str, the optimizer's class name.
        batches_per_step: int, the factor by which the global batch is larger than the user's.

    Returns:
        The rule.

    Raises:
        ValueError: if `scale_lr` is none of these.

    References:
    - Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017
    - Malladi et al., [On the SDEs and Scaling Rules for Adaptive Gradient Algorithms](
      https://arxiv.org/abs/2205.10287), 2022
    """
    if scale_lr is None:
        return LearningRateRule(1.0, "none", "scale_lr=None leaves it unchanged")
    if not is_learning_rate_scale(scale_lr):
        raise ValueError(
            f'`scale_lr` is unknown. Received: scale_lr={scale_lr!r}. Expected "auto", "linear", "sqrt", a positive '
            "number or None. Fix: choose one of these."
        )
    if not isinstance(scale_lr, str):
        return LearningRateRule(float(scale_lr), "given", "scale_lr is a number")
    if batches_per_step == 1:
        return LearningRateRule(1.0, "none", "the global batch did not grow")
    if scale_lr == "linear":
        return LearningRateRule(float(batches_per_step), "linear", "set by scale_lr")
    if scale_lr == "sqrt":
        return LearningRateRule(math.sqrt(batches_per_step), "sqrt", "set by scale_lr")
    if optimizer in LINEAR_RULE_OPTIMIZERS:
        return LearningRateRule(
            float(batches_per_step), "linear", f"{optimizer} with a {batches_per_step} times larger global batch"
        )
    if optimizer in SQRT_RULE_OPTIMIZERS:
        return LearningRateRule(
            math.sqrt(batches_per_step),
            "sqrt",
            f"{optimizer} is adaptive; the global batch is {batches_per_step} times larger",
        )
    return LearningRateRule(1.0, "none", f"no rule is known for {optimizer}", is_known=False)


def num_warmup_steps(warmup_epochs: str | float, num_epochs: int, steps_per_epoch: int) -> float:
    """Returns the number of warm-up steps.

    Args:
        warmup_epochs: `"auto"` (5 epochs or a tenth of the run, whichever is shorter), or a number of epochs.
        num_epochs: int, the epochs of the run.
        steps_per_epoch: int, the steps of an epoch.

    Returns:
        A float, not negative.

    Raises:
        ValueError: if `warmup_epochs` is negative or not a number.
    """
    if not is_warmup(warmup_epochs):
        raise ValueError(
            f'`warmup_epochs` is out of range. Received: warmup_epochs={warmup_epochs!r}. Expected "auto" or a number '
            "that is not negative. Fix: change it."
        )
    if isinstance(warmup_epochs, str):
        return min(5.0, num_epochs / 10) * steps_per_epoch
    return float(warmup_epochs) * steps_per_epoch


def warmup_multiplier(step: float, factor: float, warmup_steps: float) -> float:
    r"""Returns the multiplier of the learning rate at a step.

    $m(t) = 1 + (k - 1) \min(1, t / w)$, where $k$ is `factor`, $t$ is `step` and $w$ is `warmup_steps`.

    Args:
        step: float, steps since the origin.
        factor: float, the multiplier after warm-up.
        warmup_steps: float, the length of the warm-up, in steps.

    Returns:
        The multiplier.

    Example:
    >>> warmup_multiplier(5, factor=4.0, warmup_steps=10)
    2.5
    """
    share = 1.0 if warmup_steps <= 0 else min(1.0, step / warmup_steps)
    return 1.0 + (factor - 1.0) * share
