"""The errors of kdist.

The tree::

    KDistError
    ├── ClusterError             (ValueError)    malformed or contradictory variables of a launcher
    ├── LaunchError              (ValueError)    a job that cannot be launched: hosts, sizes, no launcher
    ├── InstallError             (RuntimeError)  a Horovod that cannot be built or installed, or fails
    ├── ScopeError               (RuntimeError)  a scope that cannot be opened: nested, contradictory, late
    ├── StrategyError            (ValueError)    an unknown or impossible strategy
    ├── EngineError              (RuntimeError)  a collective that failed or was called wrongly
    │   └── EngineNotFoundError  (ImportError)   the library behind an engine is missing
    ├── DataError                (ValueError)    input that cannot be sharded
    ├── MismatchError            (ValueError)    ranks disagree: models, optimizers, data signatures, arguments
    ├── CheckpointError          (RuntimeError)  a checkpoint that cannot be written, read, or used by this model
    ├── ClusterLostError         (RuntimeError)  a task that training needs is lost
    ├── NotSynchronizedError     (RuntimeError)  an update that was not preceded by its reduction
    └── NotFiniteError           (ArithmeticError)  a loss or a gradient that is NaN or infinite

Each message says what was received, what was expected and how to fix it.
"""


class KDistError(Exception):
    """The base class of kdist's errors.

    Attributes:
        on_all_ranks: bool, whether every rank is known to raise the same error, which only the chief then prints.
    """

    on_all_ranks = False


class ClusterError(KDistError, ValueError):
    """The launcher's environment variables are malformed or contradict each other."""


class LaunchError(KDistError, ValueError):
    """A job cannot be launched as asked: hosts, sizes, no launcher found, or ranks that do not find each other."""


class InstallError(KDistError, RuntimeError):
    """Horovod cannot be built or installed here, or does not work when it is."""


class ScopeError(KDistError, RuntimeError):
    """A scope cannot be opened here: it is nested, contradictory, or too late."""

    on_all_ranks = True


class StrategyError(KDistError, ValueError):
    """The strategy is unknown, or cannot be used in this job."""

    on_all_ranks = True


class EngineError(KDistError, RuntimeError):
    """A collective failed, or was called wrongly.

    Attributes:
        is_consequence: bool, whether the error follows from another rank's end. That rank reports the cause.
    """

    is_consequence = False


class EngineNotFoundError(EngineError, ImportError):
    """The library of an engine is not installed, or its import fails."""


class DataError(KDistError, ValueError):
    """The input cannot be sharded so that each sample is seen once."""


class MismatchError(KDistError, ValueError):
    """Ranks differ in something that must be equal on all of them."""

    on_all_ranks = True


class CheckpointError(KDistError, RuntimeError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class ClusterLostError(KDistError, RuntimeError):
    """A task of the cluster that training needs is lost."""


class NotSynchronizedError(KDistError, RuntimeError):
    """Weights were updated from gradients that were not reduced over the ranks."""

    on_all_ranks = True


class NotFiniteError(KDistError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, and `NaNPolicy` is set to raise."""

    on_all_ranks = True
