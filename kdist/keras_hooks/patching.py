"""The mechanism that patches, and the table of all patches, which `ARCHITECTURE.md` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist._tf_internals import ASSIGNMENTS, SCATTERS, uses_autograph
from kdist.errors import KDistError

WRITING = ("_load_model", "_save_model", "_should_save_model", "delete_checkpoint", "filename", "log_dir", "root")
DATASET_METHODS = ("__iter__", "get_single_element", "reduce")
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


@dataclasses.dataclass(frozen=True)
class Patch:
    """One row of the table.

    Attributes:
        owner: str, the dotted name of the class or module whose attributes are replaced; of two, the one that is there.
        names: tuple of str, the attributes.
        place: str, `"class"`, `"module"`, or `"instance"` for single objects of the class.
        until: str, how long the attributes stay replaced.
        why: str, the purpose.
    """

    owner: str
    names: tuple[str, ...]
    place: str
    until: str
    why: str

    @property
    def is_for_life(self) -> bool:
        """Whether an object's attributes are never put back: they are replaced by `patch`, else by `patched`."""
        return self.place == "instance" and self.until.endswith(" life")


_TRAINER = "keras.src.backend.tensorflow.trainer"
_TRAINER_CLASSES = f"{_TRAINER}.TensorFlowTrainer or {_TRAINER}.Trainer"  # the latter from Keras 3.16 on
_TUNER = "keras_tuner.src"
_MODEL = _TRAINER_CLASSES  # a layer that is a trainer, too
_OPTIMIZER = "keras.optimizers.Optimizer"
_TENSORFLOW = "kdist._tf_internals"
_JOB = "a job of several ranks"
_LIFE, _SCOPE, _CALL, _FIT, _PASS, _STEP = "a model's life", "a scope", "a call", "a fit", "a pass", "a step"

PATCHES = (
    Patch(
        _TRAINER_CLASSES, ("__init__", *METHODS), "class", _SCOPE, "see models made or used in it, or in `kdist plan`"
    ),
    Patch(_TRAINER_CLASSES, ("fit",), "class", _JOB, "warn of one outside of a scope"),
    Patch("tensorflow.data.Dataset", DATASET_METHODS, "class", _JOB, "count iterations"),
    Patch(_MODEL, METHODS, "instance", _LIFE, "agree, broadcast state, shard data"),
    Patch(_MODEL, ("train_step", "test_step", "predict_step"), "instance", _LIFE, "run a rank's share"),
    Patch(_MODEL, ("_make_function", "_maybe_symbolic_build"), "instance", _LIFE, "call graphs and build"),
    Patch(_MODEL, ("_get_metrics_result_or_logs", "reset_metrics"), "instance", _LIFE, "read summed metrics"),
    Patch(_MODEL, ("save", "save_weights", "export"), "instance", _LIFE, "write whole files"),
    Patch(_MODEL, ("set_weights", "load_weights"), "instance", _LIFE, "notice a rank that loads alone"),
    Patch(
        _MODEL, ("make_train_function", "make_test_function", "make_predict_function"), "instance", _LIFE, "dispatch"
    ),
    Patch(_MODEL, ("train_step", "make_train_function"), "instance", _FIT, "let callbacks look into the step"),
    Patch(_MODEL, ("compute_loss",), "instance", _STEP, "look at losses"),
    Patch(_MODEL, ("test_step", "predict_step"), "instance", _CALL, "compute nothing in `kdist plan`"),
    Patch(_MODEL, ("steps_per_execution",), "instance", _PASS, "end data of unknown length together"),
    Patch(_TRAINER, ("TFEpochIterator", "callbacks_module"), "module", _CALL, "put kdist's there"),
    Patch("keras.callbacks.CallbackList", ("set_model",), "class", "a callback's life", "know its list"),
    Patch("keras.callbacks.Callback", WRITING, "instance", _CALL, "write on one rank"),
    Patch(_OPTIMIZER, ("__init__", "apply", "apply_gradients"), "class", _SCOPE, "see optimizers made or used in it"),
    Patch(
        _OPTIMIZER,
        (
            *("apply", "apply_gradients", "build", "_get_current_learning_rate"),
            *("finalize_variable_values", "load_own_variables", "save_own_variables"),
        ),
        "instance",
        "an optimizer's life",
        "serve loops, sharded slots, TensorFlow's strategies",
    ),
    Patch(_OPTIMIZER, ("build", "add_variable"), "instance", "a build", "build later, and know slots"),
    Patch(_OPTIMIZER, ("_learning_rate",), "instance", _CALL, "copy one for `kdist plan`"),
    Patch(_OPTIMIZER, ("apply", "apply_gradients", "scale_loss"), "instance", _STEP, "run the update pipeline"),
    Patch(_OPTIMIZER, ("_get_current_learning_rate",), "instance", _STEP, "scale the learning rate"),
    Patch(_OPTIMIZER, ("_backend_apply_gradients",), "instance", _STEP, "correct the momentum"),
    Patch(
        _OPTIMIZER,
        (
            *("_trainable_variables", "_clip_gradients", "_apply_weight_decay", "update_step"),
            *("_model_variables_moving_average", "_update_model_variables_moving_average"),
        ),
        "instance",
        _STEP,
        "update parts, and fuse SGD",
    ),
    Patch("keras.optimizers.LossScaleOptimizer", ("check_finite",), "instance", _STEP, "check parts"),
    Patch("keras.optimizers.LossScaleOptimizer", ("check_finite",), "class", "`strategy.run`", "agree on overflow"),
    Patch("keras.src.trainers.compile_utils.CompileLoss", ("build",), "instance", _STEP, "compute global losses"),
    Patch("keras.src.trainers.compile_utils.CompileMetrics", ("build",), "instance", _CALL, "know for what"),
    Patch(
        "keras.src.trainers.compile_utils.CompileMetrics",
        ("build", "update_state"),
        "instance",
        _STEP,
        "see its metrics, and remake them",
    ),
    Patch("keras.losses.Loss", ("call", "reduction"), "instance", _STEP, "split a mean"),
    Patch(
        "keras.src.losses.loss",
        ("scale_loss_for_distribution", "unscale_loss_for_distribution"),
        "module",
        _SCOPE,
        "leave losses outside of a replica whole",
    ),
    Patch("keras.layers.Layer", ("activity_regularizer",), "instance", _STEP, "scale sums, before Keras 3.14"),
    Patch(_MODEL, ("_aggregate_additional_loss",), "instance", _STEP, "scale sums"),
    Patch("tensorflow.GradientTape", ("gradient", "jacobian", "stop_recording"), "class", _STEP, "scale sums"),
    Patch("keras.metrics.Mean", ("update_state",), "class", _STEP, "weight by its share"),
    Patch("keras.metrics.Sum", ("update_state",), "class", _STEP, "add its part"),
    Patch("keras.metrics.Metric", ("result",), "instance", _STEP, "know results"),
    Patch("keras.metrics.Metric", ("update_state",), "instance", _STEP, "count global batches"),
    Patch("keras.random.SeedGenerator", ("next",), "instance", _STEP, "fold the rank in"),
    Patch("kdist._tf_internals.random_ops", ("random_seed",), "module", _SCOPE, "draw the same"),
    Patch("kdist._tf_internals.random_ops", ("random_seed",), "module", _STEP, "fold the rank in"),
    Patch("tensorflow.data.Dataset", DATASET_METHODS, "class", _SCOPE, "iterate in one order"),
    Patch(f"{_TUNER}.engine.base_tuner.BaseTuner", ("search",), "class", _SCOPE, "draw the same in KerasTuner"),
    Patch(f"{_TUNER}.utils", ("save_json",), "module", _SCOPE, "let the chief write"),
    Patch(f"{_TUNER}.backend.io", ("rmtree",), "module", _SCOPE, "let the chief delete"),
    Patch("kdist._tf_internals.DefaultGraphs", ("reset",), "instance", _SCOPE, "survive `clear_session`"),
    Patch("keras.layers.BatchNormalization", ("_moments",), "class", _STEP, "synchronise behind a mask"),
    Patch("keras.layers.Embedding", ("build",), "class", _SCOPE, "hold rows"),
    Patch(
        "keras.layers.Embedding",
        ("call", "load_own_variables", "save_own_variables"),
        "instance",
        "a layer's life",
        "share rows",
    ),
    Patch("keras.Variable", ("__class__",), "instance", "a variable's life", "hold a part"),
    Patch("keras.Variable", ("_direct_assign",), "class", _STEP, "record writes"),
    Patch(f"{_TENSORFLOW}.ResourceVariable", ASSIGNMENTS, "class", _STEP, "record `tf.Variable`"),
    Patch(f"{_TENSORFLOW}.BaseResourceVariable", ASSIGNMENTS + SCATTERS, "class", _STEP, "record `tf.Variable`"),
    Patch("keras.Variable", ("_direct_assign", "_value"), "instance", _STEP, "count on workers"),
    Patch("keras.Variable", ("assign_add",), "instance", _STEP, "count on servers"),
    Patch(
        "kdist.engines.engine.Engine",
        ("allreduce", "reduce_scatter", "allgather", "alltoall", "alltoallv", "broadcast"),
        "instance",
        _STEP,
        "time, and know equals",
    ),
    Patch(
        "keras.src.saving.saving_lib",
        ("save_model", "save_weights_only", "is_memory_sufficient"),
        "module",
        _SCOPE,
        "write whole files",
    ),
    Patch("keras.src.legacy.saving.legacy_h5_format", ("save_model_to_hdf5",), "module", _SCOPE, "write whole files"),
    Patch("tensorflow.python.saved_model.save", ("save_and_return_nodes",), "module", _SCOPE, "write whole files"),
    Patch("keras.src.utils.file_utils", ("urlretrieve", "extract_archive"), "module", _SCOPE, "download once a host"),
    Patch("tensorflow.python.distribute.distribute_lib.Strategy", ("scope",), "class", _SCOPE, "refuse others"),
)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an instance, a class or a module while the context is open.

    The old attribute is restored, an override on the instance too. Raises `KDistError` if the table has no such patch.
    """
    _check_table(owner, name, for_life=False)
    attributes = vars(owner)
    is_own, before = name in attributes, attributes.get(name)
    _set(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            _set(owner, name, before)
        elif isinstance(owner, (type, types.ModuleType)):
            delattr(owner, name)
        else:
            vars(owner).pop(name, None)


def patch(owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute of an instance for its life; raises `KDistError` if the table has no such patch."""
    _check_table(owner, name, for_life=True)
    _set(owner, name, value)


def original(instance: Any, name: str) -> Callable[..., Any]:
    """Returns the method of an object's class, bound to the object, without patches of the instance."""
    method: Callable[..., Any] = python_function_of(getattr(type(instance), name)).__get__(instance, type(instance))
    return method


def python_function_of(function: Any) -> Any:
    """Returns the Python function of a `tf.function`, converted by AutoGraph; other functions as they are.

    A graph of its own would keep what the first trace of an outer one has handed to it in Python.
    """
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    inner = function.python_function
    if not uses_autograph(function):
        return inner
    try:
        converted = tf.autograph.to_graph(getattr(inner, "__func__", inner))
    except Exception:  # without its source, or of other syntax: `tf.function` runs it as it is, too
        return inner
    return converted.__get__(inner.__self__) if inspect.ismethod(inner) else converted


@contextlib.contextmanager
def watched(
    owner: type,
    names: Sequence[str],
    made: Callable[[Any], None],
    used: Callable[[Any, str], None],
    is_within: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Reports objects of a class that are made or used while the context is open, by patches of the class.

    Args:
        owner: type, the class whose `__init__` and methods are replaced.
        names: sequence of str, the methods.
        made: callable that takes each object at the beginning of its construction, and may patch its methods.
        used: callable that takes an object made elsewhere and the method's name before the method runs, and patches
            the object's methods.
        is_within: callable, whether a method of the class that runs now, of an object whose methods are patched, is
            called by the patch. Else the class's method was kept from before, and the object's own is called.
    """
    original_init = owner.__init__  # type: ignore[misc]

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        made(self)

    def reported(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name not in vars(self):
                used(self, name)
            elif is_within():  # called by the object's own patch, or by `super()`
                return original(self, *args, **kwargs)
            return getattr(self, name)(*args, **kwargs)

        return method

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(owner, "__init__", init))
        for name in names:
            # An override is called first, and may call the method that it overrides.
            for each in [owner, *(cls for cls in _subclasses(owner) if name in vars(cls))]:
                stack.enter_context(patched(each, name, reported(name, getattr(each, name))))
        yield


def _subclasses(owner: type) -> list[type]:
    """Returns the classes that are derived from a class, each once."""
    found: dict[type, None] = dict.fromkeys(owner.__subclasses__())
    for each in list(found):
        found |= dict.fromkeys(_subclasses(each))
    return list(found)


def resolved(dotted: str) -> Any:
    """Returns the class, function or module of a dotted name, of two (`"a or b"`) the first that is there.

    Raises:
        AttributeError: if there is none.
    """
    dotted, _, alternative = dotted.partition(" or ")
    if alternative:
        try:
            return resolved(dotted)
        except AttributeError:
            return resolved(alternative)
    module, _, rest = dotted, "", ""
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            if not module:
                raise AttributeError(dotted) from None
    for part in rest.split(".") if rest else ():
        found = getattr(found, part)
    return found


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, (type, types.ModuleType)) or name == "__class__":
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value  # without Keras' tracking of attributes


def _check_table(owner: Any, name: str, *, for_life: bool) -> None:
    for row in PATCHES:
        if row.is_for_life != for_life or not is_imported(row):
            continue
        found = _owner(row.owner)
        if name not in row.names:
            continue
        if isinstance(owner, found) if row.place == "instance" else owner is found:
            return
        if row.place == "class" and isinstance(owner, type) and issubclass(owner, found) and name in vars(owner):
            return  # an override
    raise KDistError(
        f"The table of patches has no such row. Received: {name!r} of {owner!r}, "
        f"{'for its life' if for_life else 'for a time'}. Expected a row in kdist/keras_hooks/patching.py. Fix: add it."
    )


def is_imported(row: Patch) -> bool:
    """Returns whether the script has imported the library of a row."""
    return row.owner.partition(".")[0] in sys.modules


_owner = functools.cache(resolved)
