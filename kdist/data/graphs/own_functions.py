"""Operations of a rank's pipeline with functions of kdist's own: quick to prepare, and cheap to run.

An iterator prepares its functions again, in each call and each epoch. One that might run on several devices is placed
and cut into parts then, which takes milliseconds; and it runs on several threads, which takes longer than small
operations do. kdist's own only choose and gather rows, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import INPUTS, ON_ONE_DEVICE, keep_alive, resources_of

_CALLS = ("Case", "For", "If", "PartitionedCall", "While")  # ends of the names of operations that call functions
_MAPPED = "mapped"
_VARIANT = tf.TensorSpec([], tf.variant)


def traced(function: Callable[..., Any], *signature: Any) -> Any:
    """Returns a function of tensors on the CPU, traced for a signature, for the operations of this file."""
    made = tf.function(function, autograph=False, experimental_attributes=ON_ONE_DEVICE)
    return made.get_concrete_function(*signature)


def applied(
    op: Callable[..., Any], dataset: tf.data.Dataset, function: Any, arguments: Sequence[Any], element: Any
) -> tf.data.Dataset:
    """Applies a dataset op to a traced function of the elements and of other arguments.

    Args:
        op: callable, one of `tf.raw_ops`.
        dataset: `tf.data.Dataset`.
        function: what `traced` has returned.
        arguments: sequence of tensors.
        element: structure of specs of an element of the result.
    """
    specs = tf.nest.flatten(element)
    tensors = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
    variant = op(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=[tf.convert_to_tensor(each) for each in arguments],
        f=function,
        output_types=[spec.dtype for spec in tensors],
        output_shapes=[spec.shape for spec in tensors],
    )
    return keep_alive(tf.data.experimental.from_variant(variant, element), dataset, function)


def map_op(f: Any, **arguments: Any) -> Any:
    """Runs the op of `Dataset.map`, whose function one thread runs, unless that calls other functions.

    The thread would wait forever for what it is to run itself.
    """
    calls = any(each.type.endswith(_CALLS) for each in f.graph.get_operations())
    return tf.raw_ops.MapDataset(f=f, use_inter_op_parallelism=calls, preserve_cardinality=True, **arguments)


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `dataset.map(function)` for a function of kdist's own.

    Args:
        dataset: `tf.data.Dataset`.
        function: callable that takes an element, a tuple as arguments, and returns a structure of dense tensors.
    """
    spec, found = dataset.element_spec, []
    specs = tf.nest.flatten(spec)
    if not all(isinstance(each, (tf.TensorSpec, tf.data.DatasetSpec)) for each in specs):
        return dataset.map(function)  # which `tf.data` packs for its operations

    def flat(*tensors: Any) -> list[Any]:
        element = tf.nest.pack_sequence_as(spec, list(map(_leaf, specs, tensors)))
        found.append(function(*element) if type(element) is tuple else function(element))
        return tf.nest.flatten(found[-1])

    made = traced(flat, *[each if isinstance(each, tf.TensorSpec) else _VARIANT for each in specs])
    outputs = [tf.TensorSpec(each.shape, each.dtype) for each in made.outputs]
    return _mapped(dataset, made, tf.nest.pack_sequence_as(found[-1], outputs))


def is_dense(spec: Any) -> bool:
    """Returns whether all parts of an element are dense tensors, as what `mapped` makes."""
    return all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(spec))


def _leaf(spec: Any, tensor: Any) -> Any:
    """Returns a part of an element, of the tensor that an operation of `tf.data` has for it."""
    return tensor if isinstance(spec, tf.TensorSpec) else tf.data.experimental.from_variant(tensor, spec.element_spec)


def is_mapped(dataset: tf.data.Dataset) -> bool:
    """Returns whether `mapped` has made a dataset."""
    return _MAPPED in resources_of(dataset)


def mapped_again(made: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Applies what `mapped` has applied to another dataset of the same elements."""
    return _mapped(dataset, *resources_of(made)[_MAPPED])


def _mapped(dataset: tf.data.Dataset, function: Any, element: Any) -> tf.data.Dataset:
    made = applied(map_op, dataset, function, function.captured_inputs, element)
    resources_of(made).update({_MAPPED: (function, element), INPUTS: [dataset]})
    return made
