"""The strategies with options that a user can pass to `kdist.scope`; without TensorFlow."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kdist._suggestions import constructor_with_suggestions
from kdist.errors import StrategyError
from kdist.strategies.selection import ENGINES

if TYPE_CHECKING:
    import tensorflow as tf

COMPRESSIONS = ("fp16", "bf16", "powersgd", "topk")

STALENESS = ("ignore", "scale", "drop")

START_TIMEOUT = 600.0
"""The default of `start_timeout`, in seconds."""


def is_positive(value: object) -> bool:
    """Returns whether a value is a number above 0."""
    return _is_number(value, numbers.Real) and value > 0  # type: ignore[operator]


def _is_word(value: object, words: Sequence[str]) -> bool:
    return isinstance(value, str) and value in words  # an array would be compared number by number


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # NumPy's numbers are of these types, too


def _is_count(value: object) -> bool:
    return _is_number(value, numbers.Integral) and value >= 1  # type: ignore[operator]


# The check of each option of `AllReduce`, and what it expects.
_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "engine": (lambda value: _is_word(value, ("auto", *ENGINES)), f"one of {', '.join(map(repr, ('auto', *ENGINES)))}"),
    "compression": (
        lambda value: value is None or _is_word(value, COMPRESSIONS),
        f"None, {' or '.join(map(repr, COMPRESSIONS))}",
    ),
    "powersgd_rank": (_is_count, "an integer of at least 1"),
    "topk_ratio": (lambda value: is_positive(value) and value <= 1, "a number above 0 and at most 1"),
    "bucket_mb": (lambda value: value is None or is_positive(value), "None or megabytes, above 0"),
    "sparse_as_dense": (lambda value: isinstance(value, bool), "a bool"),
    "sync_every": (_is_count, "an integer of at least 1"),
    "shard": (lambda value: value is None or _is_word(value, ("optimizer",)), "None or 'optimizer'"),
    "shard_embeddings": (lambda value: value is None or is_positive(value), "None or bytes, above 0"),
    "outer_learning_rate": (is_positive, "a number above 0"),
    "outer_momentum": (
        lambda value: _is_number(value, numbers.Real) and 0 <= value < 1,
        "a number from 0 to below 1",
    ),
    "start_timeout": (is_positive, "seconds, above 0"),
}


@constructor_with_suggestions
@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Synchronous data parallelism with options, for `kdist.scope(strategy=...)`.

    Args:
        engine: str, how the ranks communicate: `"auto"` (what the launcher implies), `"mpi"`, `"horovod"` or
            `"collective"`.
        start_timeout: float, seconds in which all ranks must open their first scope.
        compression: str or `None`, the compression of gradients. Statistics, metrics and weights stay exact, and all
            ranks have the same sums; but results are only close to those of one process. `None` sends gradients
            unchanged.

            - `"fp16"` (eleven bits of precision, from 6e-8 to 65504) or `"bf16"` (eight bits, any size): 16-bit
              numbers, summed in `float32`. Halves the bytes that are sent.
            - `"powersgd"`: matrices as products of two factors of low rank. Sends a hundredth of the bytes of large
              matrices. Error feedback adds what was not sent to the next gradient.
            - `"topk"`: the largest numbers of each gradient and their indices, with error feedback. The bytes that a
              rank receives grow with the number of ranks.
        powersgd_rank: int, the rank of the factors of `"powersgd"`: a higher one is closer to the gradient.
        topk_ratio: float above 0, at most 1, the fraction of a gradient's numbers that `"topk"` sends.
        bucket_mb: float or `None`, megabytes of gradients per message; each is sent during the backward pass. `None`
            sends all in one message. The sums are the same. It is faster where a core or a GPU is idle meanwhile.
        sparse_as_dense: bool, whether the gradient of an `Embedding` is all-reduced as a dense tensor of the whole
            table, instead of gathering the rows that each rank used. It is faster where the ranks together use more
            rows than the table has. SGD has the result of one process. Keras' other optimizers, and clipping, square
            the sum of a row's gradients, where one process squares each of them.
        sync_every: int, the number of local steps of `fit` after which the ranks average their weights (local SGD). A
            local step is on the rank's own batch, at the optimizer's rate (`scale_lr="auto"` scales nothing). 1 sums
            gradients in each step, which is exact; more is not, and is for very slow networks. Ranks have equal
            weights at the end of each epoch, and where `BackupAndRestore` saves.
        shard: str or `None`, what each rank holds and updates its part of. `"optimizer"`: the optimizer's state, and
            the gradients' sums (ZeRO stages 1 and 2). Each rank updates its part of every weight; all ranks gather the
            weights. Results and files are those without it. With Adam and N ranks, weights of P bytes and slots take
            P + 2P/N bytes on a rank, not 3P.
        shard_embeddings: float or `None`, the bytes from which on the table of a `keras.layers.Embedding` is in parts:
            of N ranks, rank r holds rows r, r + N, r + 2N, ... and their slots. A step sends each row that a rank needs
            once, and each gradient to the rank that holds its row. Results and files are those without it. It can stand
            beside `shard="optimizer"`, which is for all other weights.
        outer_learning_rate: float, the rate at which the mean change of the ranks' weights is applied to the last
            common weights: 1 takes the mean of the weights.
        outer_momentum: float from 0 to below 1, Nesterov's momentum of this update. DiLoCo uses a rate of 0.7 and a
            momentum of 0.9.

    Raises:
        StrategyError: if an option is invalid.

    Example:
    ```python
    with kdist.scope(kdist.AllReduce(compression="bf16")):
        ...
    ```

    References:
        - Vogels, Karimireddy and Jaggi, 2019, PowerSGD, https://arxiv.org/abs/1905.13727
        - Lin et al., 2018, Deep Gradient Compression, https://arxiv.org/abs/1712.01887
        - Rajbhandari et al., 2019, ZeRO, https://arxiv.org/abs/1910.02054
        - Douillard et al., 2023, DiLoCo, https://arxiv.org/abs/2311.08105
    """

    engine: Literal["auto", "mpi", "horovod", "collective"] = "auto"
    start_timeout: float = START_TIMEOUT
    compression: Literal["fp16", "bf16", "powersgd", "topk"] | None = None
    powersgd_rank: int = 4
    topk_ratio: float = 0.01
    bucket_mb: float | None = None
    sparse_as_dense: bool = False
    sync_every: int = 1
    shard: Literal["optimizer"] | None = None
    shard_embeddings: float | None = None
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raises for an option that is invalid."""
        _refuse(type(self).__name__, self._problem())

    @property
    def word(self) -> str:
        """The word that names it in `kdist.scope`."""
        return self.engine

    @property
    def in_parts(self) -> str:
        """The option by which each rank holds its part of some state, as a user writes it; `""` without one."""
        words = [f'shard="{self.shard}"'] if self.shard else []
        return " and ".join([*words, *(["shard_embeddings"] if self.shard_embeddings is not None else [])])

    def _problem(self) -> str | None:
        """Returns what is wrong with the options, or `None`."""
        for name, (is_valid, expected) in _VALID.items():
            if not is_valid(value := getattr(self, name)):
                return f"{name}={value!r}. Expected {expected}"
        is_local = self.sync_every > 1
        conflicts = (
            ("shard", "compression", self.compression in ("powersgd", "topk"), "None, 'fp16' or 'bf16'"),
            ("shard", "sync_every", is_local, "one of the two"),
            ("shard_embeddings", "sync_every", is_local, "one of the two"),
            ("compression", "sync_every", is_local, "one of the two"),
        )
        for name, other, excludes, expected in conflicts:
            if excludes and (value := getattr(self, name)) is not None:
                return f"{name}={value!r} with {other}={getattr(self, other)!r}. Expected {expected}"
        used = {
            "powersgd_rank": (self.compression == "powersgd", "compression='powersgd'"),
            "topk_ratio": (self.compression == "topk", "compression='topk'"),
            "sparse_as_dense": (self.sync_every == 1, "sync_every=1"),
            "outer_learning_rate": (self.sync_every > 1, "sync_every above 1"),
            "outer_momentum": (self.sync_every > 1, "sync_every above 1"),
        }
        for name, (is_used, other) in used.items():
            if not is_used and getattr(self, name) != getattr(type(self), name):
                return f"{name}={getattr(self, name)!r}, which has no effect. Expected {other} with it"
        return None


@constructor_with_suggestions
@dataclasses.dataclass(frozen=True)
class TPU:
    """Training on a TPU by TensorFlow's own `TPUStrategy`, for `kdist.scope(strategy=...)`.

    Batch and learning rate scale with its replicas; the rest is Keras' own code. The calls to TensorFlow are tested;
    kdist has not been run on a TPU.

    Args:
        resolver: str or `tf.distribute.cluster_resolver.TPUClusterResolver`: the TPU's name, its address
            (`"grpc://10.0.0.2:8470"`) or `"local"` on a TPU VM. `None` for the one in the environment (`TPU_NAME`).
        timeout: float, seconds in which the TPU must answer.

    Raises:
        StrategyError: if an option is invalid.

    Example:
    ```python
    with kdist.scope(kdist.TPU("local")):
        ...
    ```
    """

    resolver: str | tf.distribute.cluster_resolver.TPUClusterResolver | None = None
    timeout: float = 30.0

    def __post_init__(self) -> None:
        """Raises for an option that is invalid."""
        _refuse(type(self).__name__, self._problem())

    @property
    def word(self) -> str:
        """The word that names it in `kdist.scope`."""
        return "tpu"

    def _problem(self) -> str | None:
        """Returns what is wrong with the options, or `None`."""
        return _timeout_problem(self.timeout)


@constructor_with_suggestions
@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """Asynchronous training with parameter servers, for `kdist.scope(strategy=...)`.

    The staleness of an update is the number of other updates that were applied after its weights were read.

    Args:
        staleness: str, how stale updates are treated: `"ignore"` applies them unchanged, `"scale"` divides their
            learning rate by the staleness, `"drop"` drops those with a staleness above `bound`.
        bound: int or `None`, the largest staleness that `"drop"` applies: required with `"drop"`, else `None`.
        warmup_steps: int, the number of first steps of each `fit` that one worker makes alone, without staleness.
        num_ps: int, the number of ranks that are parameter servers under an MPI launcher. A `TF_CONFIG` has its own.
        timeout: float, seconds in which tasks must start, in which a step must finish, and for which training waits
            when no worker is left.

    Raises:
        StrategyError: if an option is invalid.

    Example:
    ```python
    with kdist.scope(kdist.ParameterServer(staleness="scale")):
        ...
    ```

    References:
        - Zhang et al., 2015, Staleness-aware Async-SGD for Distributed Deep Learning, https://arxiv.org/abs/1511.05950
    """

    staleness: Literal["ignore", "scale", "drop"] = "ignore"
    bound: int | None = None
    warmup_steps: int = 0
    num_ps: int = 1
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Raises for an option that is invalid."""
        _refuse(type(self).__name__, self._problem())

    @property
    def word(self) -> str:
        """The word that names it in `kdist.scope`."""
        return "parameter_server"

    def _problem(self) -> str | None:
        """Returns what is wrong with the options, or `None`."""
        if not isinstance(self.staleness, str) or self.staleness not in STALENESS:
            return f"staleness={self.staleness!r}. Expected one of {', '.join(map(repr, STALENESS))}"
        if (self.staleness == "drop") != (self.bound is not None):
            return (
                f"staleness={self.staleness!r} with bound={self.bound!r}. Expected a bound for 'drop' and only for it"
            )
        least = {"bound": 0, "warmup_steps": 0, "num_ps": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not (value is None and name == "bound") and not (
                _is_number(value, numbers.Integral) and value >= lowest
            ):
                return f"{name}={value!r}. Expected an integer of at least {lowest}"
        return _timeout_problem(self.timeout)


def _refuse(name: str, problem: str | None) -> None:
    if problem is not None:
        raise StrategyError(f"An option is invalid. Received: {problem}. Fix: change it in kdist.{name}(...).")


def _timeout_problem(value: object) -> str | None:
    return None if is_positive(value) else f"timeout={value!r}. Expected seconds, above 0"
