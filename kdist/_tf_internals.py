"""The one file that imports `tensorflow.python`: base classes of strategies, TensorFlow's own cluster, SavedModels.

TensorFlow has no public base classes for strategies. These are those of its own strategies, with the same names since
TensorFlow 2.4. Nor has it a public way to start a server for collective ops, or to register a function definition: its
own code calls the eager context, as it is done here. And `tf.saved_model` is another module object after each
`import tensorflow.saved_model`: what all of them call is in `saved_model_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import Cluster, ClusterCoordinator
from tensorflow.python.distribute.distribute_lib import (
    ReplicaContext,
    Strategy,
    StrategyExtendedV1,
    get_update_replica_id,
)
from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2Extended
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import function_def_to_graph, op_def_registry, ops, random_seed
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.ops import control_flow_util, random_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable, UninitializedVariable
from tensorflow.python.saved_model import save as saved_model_module

__all__ = [
    "BaseResourceVariable",
    "DefaultGraphs",
    "ParameterServerStrategyV2Extended",
    "ReplicaContext",
    "ResourceVariable",
    "Strategy",
    "StrategyExtendedV1",
    "UninitializedVariable",
    "abort_collectives",
    "add_control_inputs",
    "add_function",
    "body_of",
    "call_flat",
    "call_on_iterator",
    "control_outputs",
    "default_graphs",
    "has_gradient",
    "has_state",
    "is_compiled_by_xla",
    "is_initialized",
    "is_updating",
    "is_used_up",
    "keep_open_scopes",
    "missing_names",
    "random_ops",
    "recorded_elements",
    "saved_model_module",
    "schedule_on_any_worker",
    "seeds_of_op",
    "start_collective_server",
    "without_tracing_warnings",
    "written_resources",
]

ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
"""The methods that write a `tf.Variable`; `ResourceVariable`, its class, has them beside its parent's."""

SCATTERS = (
    *("batch_scatter_update", "scatter_add", "scatter_div", "scatter_max", "scatter_min", "scatter_mul"),
    *("scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update", "scatter_sub"),
    *("scatter_update", "_strided_slice_assign"),
)
"""The methods that write a part of it."""

OVERRIDDEN = (
    *("_broadcast_to", "_call_for_each_replica", "_create_variable", "_distribute_datasets_from_function"),
    *("_experimental_distribute_dataset", "_experimental_distribute_values_from_function", "_gather_to_implementation"),
    *("_in_multi_worker_mode", "_num_replicas_in_sync", "_reduce_to", "_replica_ctx_all_reduce"),
    *("_replica_ctx_update", "_update", "_update_non_slot"),
    *("_use_merge_call", "_validate_colocate_with_variable"),
)
"""The methods of a strategy's `extended` that kdist's strategies override: TensorFlow calls them."""


def missing_names() -> list[str]:
    """Returns the private names in use that the installed TensorFlow lacks: those that an import does not find."""
    used: list[tuple[Any, tuple[str, ...]]] = [
        (context.context(), ("_initialized", "abort_collective_ops", "add_function_def", "enable_collective_ops")),
        (tf.Graph(), ("_thread_local",)),
        (tf.Operation, ("_add_control_inputs", "_control_outputs")),
        (ConcreteFunction, ("_call_flat",)),
        (iter(tf.data.Dataset.range(1)), ("_iterator_resource",)),
        (tf.GradientTape(), ("_ensure_recording", "_tape")),
        (tf.function(len), ("_autograph", "_omit_frequent_tracing_warning")),
        (Cluster, ("schedule",)),
        (ops, ("get_gradient_function",)),
        (StrategyExtendedV1, OVERRIDDEN),
        (ParameterServerStrategyV2Extended, ("_create_variable", "_create_variable_round_robin")),
        (BaseResourceVariable, (*ASSIGNMENTS, *SCATTERS)),
    ]
    found = [f"{owner!r}.{name}" for owner, names in used for name in names if not hasattr(owner, name)]
    if "_cluster" not in ClusterCoordinator.__init__.__code__.co_names:
        found.append("ClusterCoordinator._cluster")
    return found


def is_initialized() -> bool:
    """Returns whether TensorFlow has initialised its devices in this process."""
    return bool(context.context()._initialized)


def uses_autograph(function: Any) -> bool:
    """Returns whether a `tf.function` converts Python's branches and loops on tensors."""
    return bool(function._autograph)


def is_compiled_by_xla() -> bool:
    """Returns whether what is traced now is in a `tf.function(jit_compile=True)`."""
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def is_used_up(tape: tf.GradientTape) -> bool:
    """Returns whether a tape has returned its one set of gradients, so that it raises when it is asked for more."""
    return tape._tape is None


def recorded_elements(tape: tf.GradientTape, target: tf.Tensor) -> list[tf.Tensor]:
    """Returns the elements of a tensor that a tape has recorded, so that it can differentiate each."""
    with tape._ensure_recording():
        return list(tf.unstack(tf.reshape(target, [-1])))


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Lets an operation of a graph wait for others, of which none may depend on it."""
    operation._add_control_inputs(list(others))


def control_outputs(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that wait for one and take nothing from it."""
    return list(operation._control_outputs)


def has_state(kind: str) -> bool:
    """Returns whether a kind of operation has a state, as one that writes, prints or sends; `True` for unknown ones."""
    definition = op_def_registry.get(kind)
    # Horovod's send, and do not say so.
    return definition is None or bool(definition.is_stateful) or kind.startswith("Horovod")


def is_updating() -> bool:
    """Returns whether a strategy of TensorFlow's is updating a variable, by its `extended.update`."""
    return get_update_replica_id() is not None


default_graphs = ops._default_graph_stack
"""The default graphs of this process's threads; on a thread's graph TensorFlow keeps the scopes that are open."""

DefaultGraphs = type(default_graphs)


def keep_open_scopes(reset: Callable[[], None]) -> None:
    """Calls a function that replaces this thread's default graph; the new one has the scopes that are open."""
    scopes = ops.get_default_graph()._thread_local
    reset()
    ops.get_default_graph()._thread_local = scopes


def has_gradient(operation: tf.Operation) -> bool:
    """Returns whether an operation can be differentiated, if only as one without any gradient by its inputs."""
    try:
        ops.get_gradient_function(operation)
    except LookupError:
        return False
    return True


def seeds_of_op(op_seed: int | None, next_seed: Callable[[], int] | None = None) -> tuple[int | None, int | None]:
    """Returns the two seeds of a random op, as TensorFlow's `get_seed` does.

    Args:
        op_seed: int or `None`, as given by the user.
        next_seed: optional callable that returns the seed of an eager op without any. Without it, such an op draws
            other numbers in each process.
    """
    if next_seed and op_seed is None and context.executing_eagerly() and context.global_seed() is None:
        return random_seed.DEFAULT_GRAPH_SEED, next_seed()
    return random_seed.get_seed(op_seed)


def start_collective_server(server: Any, leader: str) -> None:
    """Makes this process a task of a cluster, so that its collective ops reach the other tasks.

    Its devices are renamed to those of the task: resources that were made before (variables, iterators, tables) become
    invalid.

    Args:
        server: `tf.train.ServerDef`, the cluster and this process's task in it.
        leader: str, the name of the task that leads collective groups, as `"/job:worker/replica:0/task:0"`.

    Raises:
        tf.errors.OpError: if the server cannot be started, as when its port is in use.
    """
    session = server.default_session_config
    session.CopyFrom(context.context().config)
    session.experimental.collective_group_leader = leader
    context.context().enable_collective_ops(server)
    context.ensure_initialized()


def call_on_iterator(function: Any, iterator: Any) -> Any:
    """Calls a function that was traced with an iterator of the same spec, without checking the spec.

    Args:
        function: `tf.types.experimental.ConcreteFunction`, whose only argument is an iterator.
        iterator: `tf.data.Iterator` with the element spec that the function was traced for.

    Returns:
        What the function returns.
    """
    return call_flat(function, [iterator._iterator_resource])


def call_flat(function: Any, tensors: list[Any]) -> Any:
    """Calls a function with eager tensors of the shapes and dtypes that it was traced for, without checking them.

    Args:
        function: `tf.types.experimental.ConcreteFunction`.
        tensors: list, its arguments without structure; what is `None` is left out.

    Returns:
        What the function returns.
    """
    return function._call_flat(tensors, function.captured_inputs)


def abort_collectives(message: str) -> None:
    """Makes all collective ops of this process fail, current and future ones.

    Args:
        message: str, the reason.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def add_function(definition: Any) -> None:
    """Registers a function definition, so that other functions can call it.

    Args:
        definition: `FunctionDef`. The same one may be added again; another one of the same name is an error.
    """
    context.context().add_function_def(definition)


def body_of(definition: Any) -> tuple[Any, list[str], list[str]]:
    """Returns the graph of a function's body, as a `GraphDef`, and the names of its inputs and of its outputs there.

    Args:
        definition: `FunctionDef`; what it calls must be known to the default graph.
    """
    graph_def, names = function_def_to_graph.function_def_to_graph_def(definition)
    inputs = [f"{each.name}:0" for each in definition.signature.input_arg]
    outputs = [names[definition.ret[each.name]] for each in definition.signature.output_arg]
    return graph_def, inputs, outputs


def without_tracing_warnings(function: Any) -> Any:
    """Returns a `tf.function` of which TensorFlow does not warn that it, or others like it, are traced often."""
    function._omit_frequent_tracing_warning = True
    return function


def schedule_on_any_worker(coordinator: tf.distribute.coordinator.ClusterCoordinator, call: Callable[[], None]) -> None:
    """Schedules Python that calls functions on a worker, which the coordinator's public `schedule` does not take.

    Args:
        coordinator: `tf.distribute.coordinator.ClusterCoordinator`.
        call: callable, run on the device of a free worker, in that worker's thread of this process; again on another
            worker if it raises because the first was lost.
    """
    coordinator._cluster.schedule(call, (), {})


def written_resources(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources among an operation's inputs that it may write; a call of a function says what it writes."""
    return list(get_read_write_resource_inputs(operation)[1])
