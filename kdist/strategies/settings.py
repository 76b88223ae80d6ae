"""What a scope was asked to do."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.strategies.options import AllReduce


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a scope was asked to do with the models made in it.

    Attributes:
        scale_batch: bool, whether `batch_size` is what each replica sees.
        scale_lr: `"auto"`, `"linear"`, `"sqrt"`, a number or `None`.
        warmup_epochs: `"auto"` or a number of epochs.
        auto_shard: bool, whether kdist shards the data.
        options: `AllReduce`, how gradients are reduced and weights averaged.
        micro_batches: int or `None`, the user's batches in a step of `fit`, whatever the number of ranks.
    """

    scale_batch: bool = True
    scale_lr: str | float | None = "auto"
    warmup_epochs: str | float = "auto"
    auto_shard: bool = True
    options: AllReduce = AllReduce()
    micro_batches: int | None = None

    def batches_per_step(self, size: int) -> int:
        """Returns the number of the user's batches in a step of `fit`.

        Args:
            size: int, the number of ranks.
        """
        return self.micro_batches or (size if self.scale_batch else 1)

    def values(self) -> dict[str, Any]:
        """Returns by name what a training depends on: all of it but how the engine is opened."""
        values = {**vars(self), **vars(self.options)}
        return {name: value for name, value in values.items() if name not in ("options", "engine", "start_timeout")}

    def unlike(self, other: Settings) -> str:
        """Returns in words what differs between these settings and others; empty where nothing does.

        Example:
        >>> Settings(auto_shard=True).unlike(Settings(auto_shard=False))
        'auto_shard=True, not False'
        """
        theirs = other.values()
        return ", ".join(
            f"{name}={value!r}, not {theirs[name]!r}" for name, value in self.values().items() if value != theirs[name]
        )
