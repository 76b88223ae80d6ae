"""Every error that kdist raises on purpose.

The tree::

    KDistError
    ├── ClusterError             (ValueError)    who am I: the launcher's variables are malformed or contradictory
    ├── LaunchError              (ValueError)    how are processes made: bad hosts, sizes, launcher not found
    ├── InstallError             (RuntimeError)  Horovod cannot be built, installed, or does not work
    ├── ScopeError               (RuntimeError)  a scope that cannot be entered: nested, contradicting, too late
    ├── StrategyError            (ValueError)    an unknown or impossible strategy
    ├── EngineError              (RuntimeError)  a collective that cannot be made or was called wrongly
    │   └── EngineNotFoundError  (ImportError)   the library behind an engine is missing
    ├── DataError                (ValueError)    input that cannot be sharded
    ├── MismatchError            (ValueError)    ranks disagree: models, optimizers, data signatures, arguments
    ├── CheckpointError          (RuntimeError)  a checkpoint that cannot be written, read, or used by this model
    ├── ClusterLostError         (RuntimeError)  a task that training needs is gone
    ├── NotSynchronizedError     (RuntimeError)  an update that was not preceded by its reduction
    └── NotFiniteError           (ArithmeticError)  a loss or a gradient that is NaN or infinite

Each message says what was received, what was expected and how to fix it.
"""


class KDistError(Exception):
    """The base of every error that kdist raises on purpose.

    Attributes:
        on_all_ranks: bool, whether every rank is known to raise the same error. The chief alone
            prints such an error.
    """

    on_all_ranks = False


class ClusterError(KDistError, ValueError):
    """The launcher's environment variables are malformed or contradict each other."""


class LaunchError(KDistError, ValueError):
    """A job cannot be launched as asked: hosts, sizes, or no launcher found."""


class InstallError(KDistError, RuntimeError):
    """Horovod cannot be built or installed here, or does not work when it is."""


class ScopeError(KDistError, RuntimeError):
    """A scope cannot be entered here: nested, contradicting, or too late."""


class StrategyError(KDistError, ValueError):
    """The strategy is unknown or impossible in this job."""


class EngineError(KDistError, RuntimeError):
    """A collective cannot be made, or was called wrongly.

    Attributes:
        is_echo: bool, whether another rank's end is the reason. That rank has more to say.
    """

    is_echo = False


class EngineNotFoundError(EngineError, ImportError):
    """The library behind an engine is not installed or does not load."""


class DataError(KDistError, ValueError):
    """The input cannot be shared out among the ranks so that each sample is seen once."""


class MismatchError(KDistError, ValueError):
    """Ranks disagree about what must be equal on all of them."""

    on_all_ranks = True


class CheckpointError(KDistError, RuntimeError):
    """A checkpoint cannot be written, cannot be read, or is another model's."""


class ClusterLostError(KDistError, RuntimeError):
    """A task of the cluster that training needs is gone."""


class NotSynchronizedError(KDistError, RuntimeError):
    """Weights were updated without a reduction over the ranks before it."""

    on_all_ranks = True


class NotFiniteError(KDistError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, and `NaNPolicy` was asked to raise."""

    on_all_ranks = True
