"""Runs a script up to its first training of a model of a scope, such as `fit`, and takes what that was given."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist._user_code import user_line
from kdist.errors import KDistError
from kdist.keras_hooks.patching import METHODS, patch, patched, watched
from kdist.keras_hooks.trainer import is_overridden
from kdist.planning.memory import is_training
from kdist.planning.rows import copied_bytes, fed, first_rows, held_bytes, keras_tensor, number_of_rows, repeated
from kdist.reports.scope_marks import own_scopes


@dataclasses.dataclass(eq=False)
class FirstCall(BaseException):
    """Ends the script at its first training; no `except Exception` of the script's stops it.

    Of a script that trains nothing it is the first call.

    Attributes:
        model: `keras.Model`.
        method: str, the method.
        batch: nested arrays, tensors and `None`, the first batch of the data: `x`, or `(x, y)`, or
            `(x, y, sample_weight)`.
        batch_size: int, its rows.
        data: int, the bytes of the arrays that were given.
        copies: int, the bytes of the tensors that Keras makes of them for `tf.data`.
        batches_per_step: int or `None`, how many such batches all ranks take in a step; `None` for one each.
    """

    model: keras.Model
    method: str
    batch: Any
    batch_size: int
    data: int
    copies: int
    batches_per_step: int | None


@contextlib.contextmanager
def stops_at_first_call() -> Iterator[None]:
    """Raises `FirstCall` instead of the first training of a model in a scope, or that was made in one.

    Evaluations and predictions before it return zeros, those of models outside of the scope, too. Without a training it
    is raised at the end, for the first one in a scope.

    Raises:
        KDistError: if a model is trained outside of the scope, or used there and none in it.
    """
    own_scopes.is_planned = True
    in_scope: set[int] = set()
    inferences: list[FirstCall] = []
    outside: list[KDistError] = []

    def made(model: Any) -> None:
        if own_scopes.is_open:
            in_scope.add(id(model))

    def used(model: Any, name: str) -> None:
        del name
        for method in METHODS:
            patch(model, method, lambda *args, _method=method, **kwargs: call(model, _method, args, kwargs))

    def call(model: keras.Model, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made(model)  # one that is used in a scope is of the scope
        is_outside = id(model) not in in_scope
        if is_outside:
            outside.append(_outside(model, method))
            if is_training(method):
                raise outside[-1]
        args, kwargs, x = _with_first_batch_kept(args, kwargs)
        found = _call_of(model, method, x, args, kwargs)
        if is_training(method):
            raise found
        if not is_outside and not inferences:
            inferences.append(found)
        return _zeros(found, args, kwargs)

    try:
        with watched(_trainer(), METHODS, made, used):
            yield
    except SystemExit as end:
        if end.code or not (inferences or outside):
            raise
    finally:
        own_scopes.is_planned = False
    for first in (*inferences, *outside):
        raise first


def _outside(model: keras.Model, method: str) -> KDistError:
    return KDistError(
        f"{method} was called outside of kdist.scope(). Received: {type(model).__name__}.{method} in {user_line()}. "
        "Expected a model of the scope. Fix: put the lines that make and fit the model into `with kdist.scope():`."
    )


def _trainer() -> type:
    return next(each for each in keras.Model.__mro__ if "fit" in vars(each))


def _with_first_batch_kept(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Returns the arguments of a call, and its `x` to look into: of a generator the call yields the same batches."""
    x: Any = args[0] if args else kwargs.get("x")
    if not hasattr(x, "__next__"):
        return args, kwargs, x
    first = next(x)
    kept = (each for each in itertools.chain([first], x))  # Keras knows a generator by its type
    return ((kept, *args[1:]), kwargs, iter([first])) if args else (args, {**kwargs, "x": kept}, iter([first]))


def _call_of(model: keras.Model, method: str, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstCall:
    names: tuple[str, ...] = ("x", "batch_size") if method == "predict" else ("x", "y", "batch_size")
    if method.endswith("_on_batch"):
        names = ("x",) if method.startswith("predict") else ("x", "y")
    given = dict(zip(names, args, strict=False)) | kwargs
    y, weight = given.get("y"), given.get("sample_weight")
    # Arrays and tensors have a shape; what else yields batches is a dataset, a generator or a loader.
    is_whole = hasattr(x, "__iter__") and not (hasattr(x, "shape") or isinstance(x, (list, tuple, dict)))
    is_whole = is_whole or isinstance(x, (tf.data.Dataset, keras.utils.PyDataset))
    if isinstance(x, keras.utils.PyDataset):
        batch: Any = x[0]
    elif is_whole:
        batch = next(iter(x))
        batch = tuple(batch) if isinstance(batch, list) else batch
    else:
        batch = keras.utils.pack_x_y_sample_weight(x, y, weight)
    rows = number_of_rows(batch)
    if not is_whole and not method.endswith("_on_batch"):
        rows = min(given.get("batch_size") or 32, rows)
    arrays = tf.nest.flatten([*([] if is_whole else [x, y, weight]), given.get("validation_data")])
    data = sum(map(held_bytes, arrays))
    copies = 0 if method.endswith("_on_batch") else sum(map(copied_bytes, arrays))
    batch = tf.nest.map_structure(lambda each: first_rows(each, rows), batch)
    if not is_whole and not method.endswith("_on_batch"):
        batch = tf.nest.map_structure(fed, batch)
    return FirstCall(model, method, batch, rows, data, copies, _batches_per_step(method))


def _zeros(call: FirstCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what an evaluation or prediction returns, of zeros: large weights have no values to compute with."""
    model = call.model
    if not model.built:
        model(inputs_of(call))
    with (
        patched(model, "test_step", _traced(model.test_step)),
        patched(model, "predict_step", _traced(model.predict_step)),
    ):
        try:
            return getattr(type(model), call.method)(model, *args, **kwargs)
        finally:
            model.test_function = model.predict_function = None


def _traced(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a step that returns zeros of the shapes of another's outputs, which is traced only."""

    def zeros(data: Any) -> Any:
        first = next(each for each in tf.nest.flatten(data) if each is not None)
        number = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
        specs = tf.nest.map_structure(lambda each: each if each is None else tf.type_spec_from_value(each), data)
        with tf.init_scope():
            outputs = tf.function(step).get_concrete_function(specs).structured_outputs

        def of(output: Any) -> Any:
            lengths = [
                length if length is not None else (number if not place else 1)
                for place, length in enumerate(output.shape)
            ]
            return tf.zeros(lengths, output.dtype)

        return tf.nest.map_structure(of, outputs)

    return zeros


def _batches_per_step(method: str) -> int | None:
    settings = own_scopes.settings
    if method.endswith("_on_batch") or not settings.get("scale_batch", True):
        return 1  # which is split over the ranks
    found: int | None = settings["micro_batches"] if method == "fit" else None
    return found


def inputs_of(call: FirstCall) -> Any:
    """Returns the specs of the model's inputs.

    Args:
        call: `FirstCall`.
    """
    x = keras.utils.unpack_x_y_sample_weight(call.batch)[0]
    return tf.nest.map_structure(lambda each: keras_tensor(each, call.model.compute_dtype), x)


def run_step(call: FirstCall, rows: int) -> None:
    """Runs a step of the method on some rows, those of the first batch again and again.

    Args:
        call: `FirstCall`.
        rows: int, how many.
    """
    batch = tf.nest.map_structure(lambda each: repeated(each, rows), call.batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    method = {"fit": "train", "evaluate": "test", "train_on_batch": "train", "test_on_batch": "test"}.get(call.method)
    is_custom = weight is None and is_overridden(call.model, "train_step")
    if call.method == "fit" and (y is None or is_custom):  # `train_on_batch` gives steps a tuple of three
        data = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(x, y))  # of a list TensorFlow makes one
        type(call.model).fit(call.model, tf.data.Dataset.from_tensors(data), verbose=0)
    elif method is None:
        type(call.model).predict_on_batch(call.model, x)
    else:
        getattr(type(call.model), f"{method}_on_batch")(call.model, x, y, sample_weight=weight)
