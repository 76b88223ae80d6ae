"""Synchronous data parallelism: one replica a process, gradients summed over an engine.

`AllReduceStrategy` is thin; `AllReduceExtended` does the work. Variables are plain: every rank holds its own copy,
so reading one never communicates. What keeps the copies equal is that every update is preceded by a reduction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist._tf_internals import ReplicaContext, Strategy, StrategyExtendedV1
from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import NotSynchronizedError


def shared_out_already() -> tf.data.Options:
    """Returns the options of a dataset that is a rank's own, should it be given to `fit`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


class ReplicaStep(Protocol):
    """What the strategy asks of a training step that weights its ranks by their rows.

    Attributes:
        weight: scalar float tensor, how much this rank's loss counts: by its share of the global batch, where all ranks
            make the step together.
        active: scalar `bool` tensor, whether this rank has rows that count.
        applying: bool, whether an optimizer is at work on gradients that are already reduced.
        loss_is_weighted: bool, whether the backward pass starts from the loss times the weight.
    """

    weight: tf.Tensor
    active: tf.Tensor
    applying: bool
    loss_is_weighted: bool


class AllReduceStrategy(Strategy):
    """Synchronous training on one replica a process; the engine sums gradients.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        distribute_dataset: callable that takes a `tf.data.Dataset` of global batches and returns the
            dataset of this rank's rows of each. `None` returns the dataset as it is.

    Attributes:
        settings: what the scope was asked to do that is open now, or `None`.

    Example:
    ```python
    strategy = AllReduceStrategy(SingleEngine())
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    ```
    """

    def __init__(
        self,
        engine: Engine,
        distribute_dataset: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None,
    ) -> None:
        super().__init__(AllReduceExtended(self, engine, distribute_dataset))
        self.settings: Any = None

    @property
    def engine(self) -> Engine:
        """The engine that the ranks talk through."""
        return self.extended.engine


class AllReduceExtended(StrategyExtendedV1):
    """The implementation of `AllReduceStrategy`.

    Args:
        strategy: the `AllReduceStrategy` that this belongs to.
        engine: `Engine`, how the ranks talk to each other.
        distribute_dataset: see `AllReduceStrategy`.
    """

    def __init__(
        self,
        strategy: Strategy,
        engine: Engine,
        distribute_dataset: Callable[[tf.data.Dataset], tf.data.Dataset] | None,
    ) -> None:
        super().__init__(strategy)
        self.engine: Engine = engine
        self._distribute_dataset = distribute_dataset
        self.step: ReplicaStep | None = None

    @contextlib.contextmanager
    def in_step(self, step: ReplicaStep) -> Iterator[None]:
        """Makes the strategy weight what it reduces by the step's rows, while a training step is traced or run.

        Args:
            step: the step at work.
        """
        outer, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outer

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Makes what this rank reduces its own, while a step of this rank alone is traced or run."""
        outer, self.engine = self.engine, SingleEngine()
        try:
            yield
        finally:
            self.engine = outer

    def reduce_sum(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Sums tensors over the ranks, in one message.

        Collective: every rank must call this, in the same order.
        """
        return self.engine.allreduce(tensors)

    # What Keras' optimizers and losses ask.

    @property
    def _num_replicas_in_sync(self) -> int:
        # Within a training step Keras' losses must not divide by the number of replicas: the step weights each
        # rank by its share of the global batch, which is exact for ragged batches too.
        return self.engine.size if self.step is None else 1

    def _use_merge_call(self) -> bool:
        # With merge calls, reductions would go through `_reduce_to`, in cross-replica context.
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = self.reduce_sum(tf.nest.flatten(value))
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            flat = [v / tf.cast(self.engine.size, v.dtype) for v in flat]
        return tf.nest.pack_sequence_as(value, flat)

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: tuple = (), kwargs: dict | None = None, group: bool = True
    ) -> Any:
        if self.step is not None and not self.step.applying:
            raise NotSynchronizedError(
                f"Variable {getattr(var, 'name', var)!r} is updated by an optimizer whose gradients were not "
                "reduced over the ranks. Expected every optimizer of the training step to be an attribute of the "
                "model, so that kdist sees it. Fix: assign the optimizer to the model (`self.my_optimizer = ...`) "
                f"or pass it to `compile`. Versions: TensorFlow {tf.__version__}."
            )
        return self._run_update(var, fn, args, kwargs or {}, group)

    def _update(self, var: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool) -> Any:
        # Cross-replica context: nothing was reduced here. Keras' averaging of weights (EMA) may come this way; an
        # optimizer's update may not.
        if self.engine.size > 1 and getattr(fn, "__name__", "") == "apply_grad_to_update_var":
            raise NotSynchronizedError(
                f"Variable {getattr(var, 'name', var)!r} is updated from this rank's own gradients. Received: an "
                "optimizer's update outside of `strategy.run` and of Keras' verbs. Expected gradients that were summed "
                "over the ranks. Fix: put the step of your training loop into a function and call "
                "`strategy.run(function, args=...)`, with `strategy` from `with kdist.scope() as strategy:`."
            )
        return self._run_update(var, fn, args, kwargs, group)

    def _run_update(self, var: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool) -> Any:
        result = fn(var, *args, **kwargs)
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
        del colocate_with_variable  # every variable is on this process

    def read_var(self, replica_local_var: Any) -> tf.Tensor:
        """Returns the value of a variable, as this rank has it."""
        return tf.identity(replica_local_var)

    def value_container(self, value: Any) -> Any:
        """Returns the value: it is its own container."""
        return value

    def non_slot_devices(self, var_list: Any) -> Any:
        """Returns the devices for variables that are no slots."""
        del var_list
        return self.worker_devices

    # Replica and cross-replica context.

    def _call_for_each_replica(self, fn: Callable[..., Any], args: tuple, kwargs: dict | None) -> Any:
        with _AllReduceReplicaContext(self._container_strategy(), self.engine.rank), self._finite_together():
            return fn(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def _finite_together(self) -> Iterator[None]:
        """Lets optimizers that scale the loss take an update on all ranks, or leave it out on all.

        Keras asks whether gradients are finite before it sums them: in a loop of the user's own each rank's are its own
        then. Kdist's own steps have summed them.
        """
        optimizer_class = keras.optimizers.LossScaleOptimizer
        original = optimizer_class.check_finite

        def check_finite(optimizer: Any, grads: Any) -> Any:
            is_finite = original(optimizer, grads)
            if self.step is not None:
                return is_finite
            (num_finite,) = self.reduce_sum([tf.cast(is_finite, tf.int32)])
            return num_finite == self.engine.size

        optimizer_class.check_finite = check_finite
        try:
            yield
        finally:
            optimizer_class.check_finite = original

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        (total,) = self.reduce_sum([tf.convert_to_tensor(value)])
        return total / tf.cast(self.engine.size, total.dtype) if reduce_op == tf.distribute.ReduceOp.MEAN else total

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> tf.Tensor:
        del destinations, options
        axis = int(tf.get_static_value(axis))
        value = tf.convert_to_tensor(value)
        # Ranks may differ in the gathered axis only; the engine gathers along the first.
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        (gathered,) = self.engine.allgather([tf.transpose(value, order)])
        inverse = [order.index(i) for i in range(value.shape.rank)]
        return tf.transpose(gathered, inverse)

    def _broadcast_to(self, tensor: tf.Tensor, destinations: Any) -> tf.Tensor:
        del destinations
        return tensor

    # Data for custom training loops; `fit` brings its own (see training/).

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        del options
        return dataset if self._distribute_dataset is None else self._distribute_dataset(dataset)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any
    ) -> tf.data.Dataset:
        del options
        own = dataset_fn(
            tf.distribute.InputContext(
                num_input_pipelines=self.engine.size,
                input_pipeline_id=self.engine.rank,
                num_replicas_in_sync=self.engine.size,
            )
        )
        return own.with_options(shared_out_already())

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(
            tf.distribute.experimental.ValueContext(
                replica_id_in_sync_group=self.engine.rank, num_replicas_in_sync=self.engine.size
            )
        )

    # Who am I.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The one device of this process's replica."""
        return ("/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0",)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device that holds this process's variables."""
        return self.worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return self.engine.size > 1

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the chief does."""
        return self.engine.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the chief does."""
        return self.engine.rank == 0

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        del replica_id_in_sync_group
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        del replica_id
        return self.engine.rank


class _AllReduceReplicaContext(ReplicaContext):
    """A replica's view; within a training step, reductions in the forward pass weight the ranks."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        extended: AllReduceExtended = self._strategy.extended
        step = extended.step
        if step is None:
            return super().all_reduce(reduce_op, value, options)
        if step.applying:
            return value  # an optimizer asks for gradients that are reduced already

        def reduce(*xs: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
            active = step.active

            def mask(x: tf.Tensor) -> tf.Tensor:
                return tf.where(active, x, tf.zeros_like(x))

            ys = extended._replica_ctx_all_reduce(reduce_op, [mask(x) for x in xs], options)

            def gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
                if step.loss_is_weighted:
                    return [mask(dy) for dy in extended._replica_ctx_all_reduce(reduce_op, [mask(dy) for dy in dys])]
                # The step's gradient will be the sum over ranks of weight times gradient. This rank's part of what
                # the other ranks' losses owe to its x must therefore come out as weight times what is returned.
                weights = [tf.cast(step.weight, dy.dtype) for dy in dys]
                totals = extended._replica_ctx_all_reduce(
                    reduce_op, [mask(dy * weight) for dy, weight in zip(dys, weights, strict=True)]
                )
                return [
                    mask(tf.math.divide_no_nan(total, weight)) for total, weight in zip(totals, weights, strict=True)
                ]

            return tuple(ys), gradient

        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        return tf.nest.pack_sequence_as(value, tf.custom_gradient(reduce)(*tf.nest.flatten(value)))
