"""Synchronous data parallelism: one replica per process, gradients summed by an engine.

Variables are plain: every rank has its own copy, so reading one never communicates. The copies stay equal because every
update follows a reduction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import ReplicaContext, Strategy, StrategyExtendedV1
from kdist.data.graphs.options import sharded_options
from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import NotSynchronizedError
from kdist.keras_hooks.layers.batch_normalization import synchronized_moments
from kdist.keras_hooks.optimizers import UPDATE
from kdist.keras_hooks.patching import patched
from kdist.reports.own_statistics import tell_of_own_statistics
from kdist.state.random_state import AgreedDraws
from kdist.state.versions import Versions
from kdist.strategies.differentiable import sum_over_ranks
from kdist.strategies.open_step import OpenStep
from kdist.strategies.ordered_sums import ordered_sums
from kdist.strategies.update_chain import UpdateChain


class AllReduceStrategy(Strategy):
    """Synchronous training on one replica per process; the engine sums gradients.

    Collective: every rank must make one, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        distribute_dataset: callable that takes a `tf.data.Dataset` of global batches, and as `auto_shard` whether it
            is the same on all ranks, and returns the dataset of this rank's rows of each. `None` returns the dataset
            as it is.

    Attributes:
        settings: `Settings` of the open scope, or `None`.
        draws: `AgreedDraws`, what `tf.random` draws in scopes.
        versions: `Versions` of the files that ranks write.
        running: list, the sessions of the models whose methods run, the outermost first.

    Example:
    ```python
    strategy = AllReduceStrategy(SingleEngine())
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    ```
    """

    def __init__(self, engine: Engine, distribute_dataset: Callable[..., tf.data.Dataset] | None = None) -> None:
        super().__init__(AllReduceExtended(self, engine, distribute_dataset))
        self.settings: Any = None
        self.draws = AgreedDraws()
        self.versions = Versions(engine)
        self.running: list[Any] = []

    @property
    def engine(self) -> Engine:
        """The engine of the ranks."""
        return self.extended.engine


class AllReduceExtended(StrategyExtendedV1):
    """The implementation of `AllReduceStrategy`.

    Args:
        strategy: the `AllReduceStrategy` that this belongs to.
        engine: `Engine`, how the ranks communicate.
        distribute_dataset: see `AllReduceStrategy`.
    """

    def __init__(
        self, strategy: Strategy, engine: Engine, distribute_dataset: Callable[..., tf.data.Dataset] | None
    ) -> None:
        super().__init__(strategy)
        self.engine: Engine = engine
        self._distribute_dataset = distribute_dataset
        self.step: OpenStep | None = None
        self._updates: UpdateChain | None = None

    # The only place where a rank of the engine is a replica.

    @property
    def num_replicas(self) -> int:
        """The number of replicas that gradients are reduced over."""
        return self.engine.size

    @property
    def replica_id(self) -> int:
        """This process's replica, from 0 to `num_replicas - 1`."""
        return self.engine.rank

    @contextlib.contextmanager
    def in_step(self, step: OpenStep) -> Iterator[None]:
        """Weights reductions by the rows of a training step while that is traced or run.

        Args:
            step: the training step.
        """
        outer, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outer

    def next_seed(self) -> int:
        """See `AgreedDraws.next_seed`."""
        return int(self._container_strategy().draws.next_seed())

    @property
    def is_in_replica(self) -> bool:
        """Whether this thread is in `strategy.run` or in a step of a model."""
        # TensorFlow's default strategy, outside of all scopes, has a replica context too.
        in_run = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        return self.step is not None or in_run

    @contextlib.contextmanager
    def reduced_replica(self) -> Iterator[None]:
        """Opens a replica context in which an optimizer applies gradients that are already reduced."""
        strategy = self._container_strategy()
        with strategy.scope(), _ReducedReplicaContext(strategy, self.replica_id), self.updating():
            yield

    @contextlib.contextmanager
    def updating(self, updates: UpdateChain | None = None) -> Iterator[None]:
        """A context for what follows a reduction, clipping too: ranks compute the same to the bit.

        Args:
            updates: `UpdateChain`, what runs the updates of variables; `None` for that of the outer context.
        """
        outer, self._updates = self._updates, updates or self._updates
        try:
            with ordered_sums() if self.num_replicas > 1 else contextlib.nullcontext():
                yield
        finally:
            self._updates = outer

    @contextlib.contextmanager
    def step_replica(self) -> Iterator[None]:
        """Opens the replica context of a step of a model that a loop of the user's calls without `strategy.run`."""
        strategy = self._container_strategy()
        with strategy.scope(), _AllReduceReplicaContext(strategy, self.replica_id):
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduces over this rank only, while a local step is traced or run."""
        outer, self.engine = self.engine, SingleEngine()
        try:
            yield
        finally:
            self.engine = outer

    def reduce_sum(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Sums tensors over the ranks in one message.

        Collective: every rank must call this, in the same order.
        """
        return self.engine.allreduce(tensors)

    # For Keras' optimizers and losses.

    @property
    def _num_replicas_in_sync(self) -> int:
        # In a training step Keras' losses must not divide by the number of replicas: the step weights each rank by
        # its share of the global batch, which is exact for ragged batches, too.
        return self.num_replicas if self.step is None else 1

    def _use_merge_call(self) -> bool:
        # With merge calls, reductions would go through `_reduce_to`, in cross-replica context.
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = self.reduce_sum(tf.nest.flatten(value))
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            flat = [v / tf.cast(self.num_replicas, v.dtype) for v in flat]
        return tf.nest.pack_sequence_as(value, flat)

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: tuple = (), kwargs: dict | None = None, group: bool = True
    ) -> Any:
        if self.step is not None and not self.step.applying:
            raise NotSynchronizedError(
                f"An optimizer's gradients were not reduced over the ranks. Received: an update of variable "
                f"{getattr(var, 'name', var)!r}. Expected every optimizer of the training step to be an attribute of "
                "the model, where kdist finds it. Fix: assign the optimizer to the model (`self.my_optimizer = ...`) "
                f"or pass it to `compile`. Versions: TensorFlow {tf.__version__}."
            )
        return self._run_update(var, fn, args, kwargs or {}, group)

    def _update(self, var: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool) -> Any:
        # Cross-replica context: nothing was reduced (`kdist/trainer/custom_loops.py` opens a replica's). Keras' moving
        # average of weights (EMA) is allowed here, an optimizer's update is not.
        if self.num_replicas > 1 and getattr(fn, "__name__", "") == UPDATE:
            raise NotSynchronizedError(
                f"Variable {getattr(var, 'name', var)!r} is updated from this rank's own gradients. Received: an "
                "optimizer's update without a call of its `apply` or `apply_gradients`, which kdist wraps. Expected "
                "gradients that were reduced over the ranks. Fix: call one of them, on an optimizer that is made in "
                f"kdist.scope(). Versions: Keras {keras.__version__}, TensorFlow {tf.__version__}."
            )
        return self._run_update(var, fn, args, kwargs, group)

    def _run_update(self, var: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool) -> Any:
        with self.updating():
            run = fn if self._updates is None else functools.partial(self._updates.run, fn)
            result = run(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _update_non_slot(
        self, colocate_with: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool
    ) -> Any:
        result = fn(*args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    # Variables: plain ones.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        colocate_with = kwargs.pop("colocate_with", None)
        if colocate_with is None or not hasattr(colocate_with, "device"):
            return next_creator(**kwargs)
        with tf.device(colocate_with.device):
            return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        del colocate_with_variable  # every variable is in this process

    def read_var(self, replica_local_var: Any) -> tf.Tensor:
        """Returns the value of this rank's copy of a variable."""
        return tf.identity(replica_local_var)

    def value_container(self, value: Any) -> Any:
        """Returns the value, which is its own container."""
        return value

    def non_slot_devices(self, var_list: Any) -> Any:
        """Returns the devices for variables that are not slots."""
        del var_list
        return self.worker_devices

    # Replica and cross-replica context.

    def _call_for_each_replica(self, fn: Callable[..., Any], args: tuple, kwargs: dict | None) -> Any:
        in_replica = _AllReduceReplicaContext(self._container_strategy(), self.replica_id)
        with in_replica, self._agreed_finite_check(), synchronized_moments(tell_of_own_statistics):
            return fn(*args, **(kwargs or {}))

    def _agreed_finite_check(self) -> contextlib.AbstractContextManager[None]:
        """Makes optimizers with a loss scale apply or skip an update on all ranks together.

        In a custom training loop Keras checks whether gradients are finite before they are summed, on each rank. In
        kdist's own steps they are summed already.
        """
        original = keras.optimizers.LossScaleOptimizer.check_finite

        def check_finite(optimizer: Any, grads: Any) -> Any:
            is_finite = original(optimizer, grads)
            if self.step is not None:
                return is_finite
            (num_finite,) = self.reduce_sum([tf.cast(is_finite, tf.int32)])
            return num_finite == self.num_replicas

        return patched(keras.optimizers.LossScaleOptimizer, "check_finite", check_finite)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        (total,) = self.reduce_sum([tf.convert_to_tensor(value)])
        return total / tf.cast(self.num_replicas, total.dtype) if reduce_op == tf.distribute.ReduceOp.MEAN else total

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> tf.Tensor:
        del destinations, options
        axis = int(tf.get_static_value(axis))
        value = tf.convert_to_tensor(value)
        # The engine gathers along the first axis, the only one in which ranks may differ.
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        (gathered,) = self.engine.allgather([tf.transpose(value, order)])
        inverse = [order.index(i) for i in range(value.shape.rank)]
        return tf.transpose(gathered, inverse)

    def _broadcast_to(self, tensor: tf.Tensor, destinations: Any) -> tf.Tensor:
        del destinations
        return tensor

    # Data of custom training loops; `fit` shards its own (kdist/data).

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        del options
        if self._distribute_dataset is None:
            return dataset
        settings = self._container_strategy().settings
        return self._distribute_dataset(dataset, auto_shard=settings is None or settings.auto_shard)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any
    ) -> tf.data.Dataset:
        del options
        own = dataset_fn(
            tf.distribute.InputContext(
                num_input_pipelines=self.num_replicas,
                input_pipeline_id=self.replica_id,
                num_replicas_in_sync=self.num_replicas,
            )
        )
        return own.with_options(sharded_options())

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(
            tf.distribute.experimental.ValueContext(
                replica_id_in_sync_group=self.replica_id, num_replicas_in_sync=self.num_replicas
            )
        )

    # Devices and the chief.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of this process's replica."""
        return ("/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0",)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of this process's variables."""
        return self.worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return self.num_replicas > 1

    @property
    def _task_id(self) -> int:
        """This process's number, for the names of temporary files, as those of KerasTuner."""
        return self.replica_id

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: only the chief does."""
        return self.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: only the chief does."""
        return self.replica_id == 0

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        del replica_id_in_sync_group
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        del replica_id
        return self.replica_id


class _AllReduceReplicaContext(ReplicaContext):
    """A replica context in which reductions in the forward pass of a training step are weighted by rank."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        extended: AllReduceExtended = self._strategy.extended
        step = extended.step
        if step is None:
            return super().all_reduce(reduce_op, value, options)
        if step.applying:
            return value  # an optimizer sums gradients that are already reduced

        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        divisor = extended.num_replicas if reduce_op == tf.distribute.ReduceOp.MEAN else 1
        sums = sum_over_ranks(extended.engine, step, tf.nest.flatten(value), divisor)
        return tf.nest.pack_sequence_as(value, sums)


class _ReducedReplicaContext(ReplicaContext):
    """A replica context whose gradients are already reduced: an optimizer's own sum leaves them alone."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value
