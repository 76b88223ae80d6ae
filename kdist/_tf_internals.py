"""The one file that imports `tensorflow.python`: what strategies are made of, and TensorFlow's own cluster.

TensorFlow has no public base classes for strategies. These are the ones that its own strategies use; they have
kept their names since TensorFlow 2.4. Nor has it a public way to let a process's collective ops reach other
processes, or to make a function known by its definition: its own code asks the eager context, as it is done here.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import (
    ReplicaContext,
    Strategy,
    StrategyExtendedV1,
    get_update_replica_id,
)
from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2Extended
from tensorflow.python.eager import context

__all__ = [
    "ParameterServerStrategyV2Extended",
    "ReplicaContext",
    "Strategy",
    "StrategyExtendedV1",
    "abort_collectives",
    "add_function",
    "call_on_iterator",
    "is_initialized",
    "is_updating",
    "start_collective_server",
]


def is_initialized() -> bool:
    """Returns whether TensorFlow has initialised its devices in this process."""
    return bool(context.context()._initialized)


def is_updating() -> bool:
    """Returns whether a strategy of TensorFlow's is updating a variable, by its `extended.update`."""
    return get_update_replica_id() is not None


def start_collective_server(server: Any, leader: str) -> None:
    """Makes this process a task of a cluster, whose collective ops reach the other tasks from now on.

    The names of this process's devices become those of its task: resources that were made before (variables,
    iterators, tables) cannot be used any more.

    Args:
        server: `tf.train.ServerDef`, the cluster and this process's task in it.
        leader: str, the name of the task that orders the others, as `"/job:worker/replica:0/task:0"`.

    Raises:
        tf.errors.OpError: if the server cannot be started, as where its port is taken.
    """
    session = server.default_session_config
    session.CopyFrom(context.context().config)
    session.experimental.collective_group_leader = leader
    context.context().enable_collective_ops(server)
    context.ensure_initialized()


def call_on_iterator(function: Any, iterator: Any) -> Any:
    """Calls a function that was traced with an iterator like this one, without comparing the two.

    Args:
        function: `tf.types.experimental.ConcreteFunction`, whose only argument is an iterator.
        iterator: `tf.data.Iterator` with the element spec that the function was traced for.

    Returns:
        What the function returns.
    """
    return function._call_flat([iterator._iterator_resource], function.captured_inputs)


def abort_collectives(message: str) -> None:
    """Makes all collective ops of this process fail, those under way and those to come.

    Args:
        message: str, why.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def add_function(definition: Any) -> None:
    """Makes a function known, so that other functions may call it.

    Args:
        definition: `FunctionDef`. One that is known may be added again; another one under its name is an error.
    """
    context.context().add_function_def(definition)
