"""Asynchronous training: variables on parameter servers, steps on workers, the chief dispatches batches.

TensorFlow's own `ParameterServerStrategy` communicates. Three things differ: variables go to the ps that holds
the fewest bytes, those of metrics stay on the chief, where they are summed, and a worker is one replica.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist._tf_internals import ParameterServerStrategyV2Extended, ReplicaContext
from kdist.errors import ScopeError

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
"""The device of the chief's own tensors and metrics."""


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """TensorFlow's strategy with variables spread by size, metrics on the chief, and one replica a worker.

    Args:
        cluster: mapping of job name to addresses; the chief's is where TensorFlow of this process will listen.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]]) -> None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        super().__init__(resolver)
        self._extended = ParameterServerExtended(self, resolver, None)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)


class ParameterServerExtended(ParameterServerStrategyV2Extended):
    """The implementation of `ParameterServerStrategy`.

    Attributes:
        bytes_of_ps: list of int, the bytes of the variables that each ps was given.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bytes_of_ps = [0] * self._num_ps
        self._retrace_functions_for_each_device = False  # what the strategy sets on the one that it makes itself

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which the steps of workers are traced on the chief, before they are scheduled."""
        self._allow_run_without_coordinator = True
        try:
            yield
        finally:
            self._allow_run_without_coordinator = False

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1  # a worker with several GPUs takes one: kdist shares a host's GPUs among its tasks

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:  # a metric's: Keras marks them so
            with tf.device(CHIEF):
                return next_creator(**kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        place = tf.DeviceSpec.from_string(variable.device)
        if place.job == "ps":
            self.bytes_of_ps[place.task] += math.prod(variable.shape) * max(variable.dtype.size, 1)
        return variable

    def _create_variable_round_robin(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # The base class takes the ps of this number.
        self._variable_count = self.bytes_of_ps.index(min(self.bytes_of_ps))
        return super()._create_variable_round_robin(next_creator, **kwargs)

    # With one replica there is nothing to merge or to reduce.

    def _use_merge_call(self) -> bool:
        return False

    def _call_for_each_replica(self, fn: Callable[..., Any], args: tuple, kwargs: dict | None) -> Any:
        if not (self._being_scheduled or self._allow_run_without_coordinator):
            raise ScopeError(
                "A training loop of your own runs on the chief alone. Received: strategy.run() with parameter servers. "
                "Expected `fit`, whose steps the workers run. Fix: make the step a model's `train_step`, and call "
                "`fit`; or train by all-reduce, which takes such loops."
            )
        with ReplicaContext(self._container_strategy(), 0):
            return fn(*args, **(kwargs or {}))

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: tuple = (), kwargs: dict | None = None, group: bool = True
    ) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)
