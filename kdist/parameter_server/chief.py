"""The chief's side of a cluster with parameter servers: it runs the script, and workers run the steps of its models."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Iterator

import keras

from kdist.errors import ScopeError
from kdist.keras_hooks.trainer import watch_models
from kdist.launchers.hosts.ports import free_ports
from kdist.parameter_server.connection import Cluster
from kdist.parameter_server.dispatch import Dispatcher
from kdist.parameter_server.membership import Membership
from kdist.parameter_server.session import train_on_workers
from kdist.parameter_server.strategy import ParameterServerStrategy
from kdist.reports import failure
from kdist.strategies.options import ParameterServer

logger = logging.getLogger("kdist")


class Chief:
    """The chief of a cluster. One for all scopes of the process.

    Args:
        cluster: mapping of job name to addresses.
        options: `ParameterServer`.

    Raises:
        ClusterError: if tasks do not join, or the chief's port is in use.
    """

    def __init__(self, cluster: Cluster, options: ParameterServer) -> None:
        self._membership = Membership(cluster, options.timeout)
        # Registered before anything can fail, so that the other tasks end in any case.
        atexit.register(lambda: self._membership.close(success=getattr(sys, "last_value", None) is None))
        self._membership.wait_for_all()
        host = cluster["chief"][0].rpartition(":")[0]
        self._strategy = ParameterServerStrategy(
            {"worker": cluster["worker"], "ps": cluster["ps"], "chief": [f"{host}:{free_ports(1)[0]}"]}
        )
        self._dispatcher = Dispatcher(self._strategy, self._membership, options.timeout)
        logger.info("%d worker(s) and %d ps train asynchronously", len(cluster["worker"]), len(cluster["ps"]))

    @contextlib.contextmanager
    def scope(self, options: ParameterServer) -> Iterator[ParameterServerStrategy]:
        """Makes workers train the models that are made while the context is open.

        Args:
            options: `ParameterServer`, for these models.
        """

        def made(model: keras.Model) -> None:
            train_on_workers(model, self._strategy, self._dispatcher, options)

        def used(model: keras.Model, method: str) -> None:
            raise ScopeError(
                f"A model made outside of kdist.scope() is used in it. Received: {type(model).__name__}.{method}. "
                "Expected the model to be made inside: its variables are to be on the ps. Fix: move the line that "
                "makes it into the scope."
            )

        with self._strategy.scope(), watch_models(made, used):
            try:
                yield self._strategy
            except SystemExit as error:
                if failure.exit_code(error):
                    self._membership.close(success=False)
                raise
