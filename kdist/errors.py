"""Every error that kdist raises on purpose.

The tree::

    KDistError
    ├── ClusterError             (ValueError)    who am I: the launcher's variables are malformed or contradictory
    ├── LaunchError              (ValueError)    how are processes made: bad hosts, sizes, launcher not found
    ├── ScopeError               (RuntimeError)  a scope that cannot be entered: nested, contradicting, too late
    ├── StrategyError            (ValueError)    an unknown or impossible strategy
    ├── EngineError              (RuntimeError)  a collective that cannot be made or was called wrongly
    │   └── EngineNotFoundError  (ImportError)   the library behind an engine is missing
    ├── DataError                (ValueError)    input that cannot be sharded
    ├── MismatchError            (ValueError)    ranks disagree: models, optimizers, data signatures, arguments
    └── NotSynchronizedError     (RuntimeError)  an update that was not preceded by its reduction

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


class ScopeError(KDistError, RuntimeError):
    """A scope cannot be entered here: nested, contradicting, or too late."""


class StrategyError(KDistError, ValueError):
    """The strategy is unknown or impossible in this job."""


class EngineError(KDistError, RuntimeError):
    """A collective cannot be made, or was called wrongly."""


class EngineNotFoundError(EngineError, ImportError):
    """The library behind an engine is not installed or does not load."""


class DataError(KDistError, ValueError):
    """The input cannot be shared out among the ranks so that each sample is seen once."""


class MismatchError(KDistError, ValueError):
    """Ranks disagree about what must be equal on all of them."""

    on_all_ranks = True


class NotSynchronizedError(KDistError, RuntimeError):
    """Weights were updated without a reduction over the ranks before it."""

    on_all_ranks = True
