"""What a scope was asked to do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a scope was asked to do with the models made in it.

    Attributes:
        scale_batch: bool, whether `batch_size` is what each replica sees.
        scale_lr: `"auto"`, `"linear"`, `"sqrt"`, a number or `None`.
        warmup_epochs: `"auto"` or a number of epochs.
        auto_shard: bool, whether kdist shares the data out.
        compression: `None`, `"fp16"`, `"bf16"`, `"powersgd"` or `"topk"`: how gradients travel.
        powersgd_rank: int, the rank of `"powersgd"`.
        topk_ratio: float, the part of a gradient that `"topk"` sends.
        bucket_mb: float or `None`, megabytes of gradients from which on a message is sent.
        sparse_as_dense: bool, whether gradients of an `Embedding` are summed, not gathered.
        sync_every: int, the steps that a rank makes by itself; 1 for gradients that are summed in each step.
        outer_learning_rate: float, the rate at which averages are applied.
        outer_momentum: float, the momentum with which they are.
    """

    scale_batch: bool = True
    scale_lr: str | float | None = "auto"
    warmup_epochs: str | float = "auto"
    auto_shard: bool = True
    compression: str | None = None
    powersgd_rank: int = 4
    topk_ratio: float = 0.01
    bucket_mb: float | None = None
    sparse_as_dense: bool = False
    sync_every: int = 1
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def unlike(self, other: Settings) -> str:
        """Returns in words what differs between these settings and others.

        Example:
        >>> Settings(auto_shard=True).unlike(Settings(auto_shard=False))
        'auto_shard=True, not False'
        """
        pairs = (
            (field.name, getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self)
        )
        return ", ".join(f"{name}={mine!r}, not {theirs!r}" for name, mine, theirs in pairs if mine != theirs)
