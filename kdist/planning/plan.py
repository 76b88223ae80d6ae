"""The plan of a training: what is public, and how it is shown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kdist._suggestions import with_suggestions
from kdist.errors import KDistError
from kdist.planning.advice import advice
from kdist.planning.memory import PARTS, Share, Sizes, is_training, parse_bytes, readable, shares

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each rank will hold in memory, per strategy; `print` shows it as a table.

    Attributes:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
        memory: int or `None`, the bytes that a rank may take.
        shares: tuple of `Share`, one for each strategy and kind of rank.
    """

    sizes: Sizes
    ranks: int
    memory: int | None
    shares: tuple[Share, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank of at least one strategy fits; true where no memory was given."""
        return self.memory is None or any(self.fits_under(each.strategy) for each in self.shares)

    def fits_under(self, strategy: str) -> bool:
        """Returns whether every rank of a strategy fits.

        Args:
            strategy: str, as in `shares`.
        """
        return all(self.memory is None or each.peak <= self.memory for each in self.shares if each.strategy == strategy)

    def advice(self, strategy: str) -> str | None:
        """Returns the least change with which a strategy fits; `None` if it does.

        Args:
            strategy: str, as in `shares`.
        """
        if self.memory is None or self.fits_under(strategy):
            return None
        return advice(self.sizes, self.ranks, self.memory, strategy)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers, texts, dicts and lists, for JSON; sizes are in bytes."""
        strategies = list(dict.fromkeys(each.strategy for each in self.shares))
        return {
            "ranks": self.ranks,
            "batch_size": self.sizes.batch_size,
            "rows": self.sizes.rows(self.ranks),
            "memory": self.memory,
            "fits": self.fits,
            "activations": self.sizes.source,
            "verb": self.sizes.method,
            "is_training": is_training(self.sizes.method),
            "strategies": [
                {
                    "strategy": name,
                    "fits": self.fits_under(name),
                    "advice": self.advice(name),
                    "ranks": [each.to_dict() for each in self.shares if each.strategy == name],
                }
                for name in strategies
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        limit = "" if self.memory is None else f", {readable(self.memory)} for each"
        method = "" if is_training(self.sizes.method) else f" of {self.sizes.method}: no training"
        rows = f"{self.sizes.rows(self.ranks)} rows"
        lines = [f"{self.ranks} rank(s) of {rows}{limit}{method}; activations: {self.sizes.source}", ""]
        head = f"{'strategy':<18}{'rank':<7}" + "".join(f"{name:>12}" if name == "activations" else f"{name:>10}"
                                                          for name in (*PARTS, "peak"))  # fmt: skip
        lines.append(head)
        for each in self.shares:
            cells = "".join(
                f"{readable(getattr(each, name)):>{12 if name == 'activations' else 10}}" for name in (*PARTS, "peak")
            )
            lines.append(f"{each.strategy:<18}{each.rank:<7}{cells}")
        if self.memory is not None:
            lines.append("")
            for name in dict.fromkeys(each.strategy for each in self.shares):
                change = self.advice(name)
                lines.append(f"{name:<18}" + ("fits" if change is None else f"does not fit. Fix: {change}"))
        return lines


def make_plan(sizes: Sizes, ranks: int, memory: str | int | None) -> Plan:
    """Returns the plan of sizes.

    Args:
        sizes: `Sizes` of one process.
        ranks: int, how many ranks train.
        memory: str as `"24GB"`, int in bytes, or `None`, what a rank may take.

    Raises:
        KDistError: if the memory cannot be parsed as a size, or there is no rank or row.
    """
    for name, value in (("ranks", ranks), ("batch_size", sizes.batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KDistError(
                f"A plan needs ranks and rows. Received: {name}={value!r}. Expected an int of at least 1. Fix: "
                f"{name}={2 if name == 'ranks' else 32}."
            )
    limit = parse_bytes(str(memory)) if memory is not None else None
    return Plan(sizes, ranks, limit, tuple(shares(sizes, ranks)))


@with_suggestions
def plan(model: keras.Model, *, batch_size: int, ranks: int, memory: str | int | None = None) -> Plan:
    """Returns what each rank will hold in memory when it trains a model, per strategy.

    Weights and slots are exact. Slots are counted without being allocated. Activations are estimated from the traced
    forward pass. `kdist plan -np N SCRIPT` measures them, and counts data and the process, too.

    Args:
        model: `keras.Model`, built and compiled.
        batch_size: int, the rows of a step on each rank.
        ranks: int, how many ranks train.
        memory: str as `"24GB"`, int in bytes, or `None`: what each rank may take.

    Returns:
        A `Plan`: `print` shows it as a table, `to_dict` returns it for JSON, `fits` says whether it fits.

    Raises:
        KDistError: if the model is not built or not compiled, has inputs of open lengths, or cannot be traced with two
            rows, or if an argument is no such number.

    Example:
    ```python
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    print(kdist.plan(model, batch_size=32, ranks=4, memory="24GB"))
    ```
    """
    from kdist.planning.weights import model_sizes

    make_plan(Sizes(0, 0, 0, 0, batch_size), ranks, memory)  # refuses before it traces
    return make_plan(model_sizes(model, batch_size), ranks, memory)
