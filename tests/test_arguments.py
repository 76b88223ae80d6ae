"""Any argument of a scope is accepted, or refused by an error with received, expected and fix."""

import contextlib
import dataclasses
import math

import keras  # noqa: F401  loaded before anything is timed
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kdist
from kdist import _arguments
from kdist.errors import KDistError, StrategyError

DEFAULTS = {
    "strategy": "auto",
    "scale_batch": True,
    "scale_lr": "auto",
    "warmup_epochs": "auto",
    "auto_shard": True,
    "stall_timeout": "auto",
    "micro_batches": None,
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["auto", "linear", "sqrt", "none", "mpi", "drop", "1", "", "0.5"]),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.complex_numbers(max_magnitude=3),
    st.builds(object),
    st.sampled_from([np.float32(0.5), np.int64(2), np.bool_(True), np.array([1.0, 2.0]), np.array(["auto", "b"])]),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=4
)


@contextlib.contextmanager
def refused_by_kdist_if_at_all():
    message = "Received: Expected Fix:"
    try:
        yield
    except KDistError as error:
        message = str(error)
    assert all(word in message for word in ("Received:", "Expected", "Fix:")), message


@pytest.mark.parametrize("name", DEFAULTS)
@given(value=anything)
def test_of_the_scope(name, value):
    with refused_by_kdist_if_at_all():
        _arguments.check({**DEFAULTS, name: value}, {})


@given(
    options=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(tuple(field.name for field in dataclasses.fields(kdist.AllReduce)), anything),
    )
)
@example(options={"compression": np.array([1.0, 2.0])})
@example(options={"shard": np.array([1.0, 2.0])})
def test_of_all_reduce(options):
    with refused_by_kdist_if_at_all():
        _arguments.check({**DEFAULTS, "strategy": kdist.AllReduce(**options)}, {})


@given(
    options=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("staleness", "bound", "warmup_steps", "num_ps", "timeout"), anything)
    )
)
def test_of_parameter_servers(options):
    with refused_by_kdist_if_at_all():
        _arguments.check({**DEFAULTS, "strategy": kdist.ParameterServer(**options)}, {})


@given(timeout=anything)
def test_of_a_tpu(timeout):
    with refused_by_kdist_if_at_all():
        _arguments.check({**DEFAULTS, "strategy": kdist.TPU("local", timeout=timeout)}, {})


@given(
    env=st.dictionaries(st.sampled_from([f"KDIST_{name.upper()}" for name in DEFAULTS]), st.text(max_size=8)),
)
def test_of_the_environment(env):
    with refused_by_kdist_if_at_all():
        _arguments.check(_arguments.with_environment(DEFAULTS, env), env)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale_batch", "no"),  # true, for Python
        ("scale_batch", None),
        ("auto_shard", "False"),
        ("scale_lr", math.nan),
        ("scale_lr", True),
        ("warmup_epochs", -1),
        ("warmup_epochs", "five"),
        ("stall_timeout", 0),
        ("stall_timeout", "600"),
        ("stall_timeout", "never"),
        ("micro_batches", 0),
        ("micro_batches", True),
        ("micro_batches", 4.0),
        ("micro_batches", "4"),
    ],
)
def test_ambiguous_values_are_refused(name, value):
    with pytest.raises(KDistError, match="Received:"):
        _arguments.check({**DEFAULTS, name: value}, {})


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (kdist.AllReduce, {"start_timeout": -1}),
        (kdist.AllReduce, {"compression": "fp8"}),
        (kdist.AllReduce, {"compression": True}),
        (kdist.AllReduce, {"compression": "powersgd", "powersgd_rank": 0}),
        (kdist.AllReduce, {"powersgd_rank": 1.5}),
        (kdist.AllReduce, {"compression": "topk", "topk_ratio": 0}),
        (kdist.AllReduce, {"topk_ratio": 1.01}),
        (kdist.AllReduce, {"sync_every": 0}),
        (kdist.AllReduce, {"sync_every": 2.5}),
        (kdist.AllReduce, {"sync_every": 2, "compression": "fp16"}),
        (kdist.AllReduce, {"outer_learning_rate": 0}),
        (kdist.AllReduce, {"outer_momentum": 1}),
        (kdist.AllReduce, {"outer_momentum": 0.9}),
        (kdist.AllReduce, {"compression": "powersgd", "topk_ratio": 0.1}),
        (kdist.AllReduce, {"bucket_mb": 0}),
        (kdist.AllReduce, {"sparse_as_dense": 1}),
        (kdist.AllReduce, {"sparse_as_dense": True, "sync_every": 2}),
        (kdist.AllReduce, {"shard_embeddings": 0}),
        (kdist.AllReduce, {"shard_embeddings": 1e6, "sync_every": 2}),
        (kdist.TPU, {"timeout": 0}),
        (kdist.ParameterServer, {"num_ps": 1.5}),
    ],
)
def test_invalid_options_are_refused_where_they_are_written(strategy, options):
    with pytest.raises(StrategyError, match=rf"Received: .*{strategy.__name__}"):
        strategy(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale_lr", np.float32(0.5)), ("scale_lr", 2), ("scale_lr", None), ("warmup_epochs", np.int64(2))]
    + [
        ("warmup_epochs", 0),
        ("stall_timeout", None),
        ("stall_timeout", "auto"),
        ("stall_timeout", math.inf),
        ("stall_timeout", np.float64(3)),
        ("micro_batches", np.int64(3)),
    ],
)
def test_numbers_of_any_type_are_accepted(name, value):
    _arguments.check({**DEFAULTS, name: value}, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KDIST_STRATEGY", "horovood"),
        ("KDIST_SCALE_LR", "lineer"),
        ("KDIST_STALL_TIMEOUT", "5s"),
        ("KDIST_MICRO_BATCHES", "4.5"),
    ],
)
def test_an_invalid_variable_is_quoted(name, text):
    with pytest.raises(KDistError, match=f"Received: {name}='{text}'"):
        _arguments.check(_arguments.with_environment(DEFAULTS, {name: text}), {name: text})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"scale_batch": False}, "scale_batch=False"),
        ({"auto_shard": False}, "auto_shard=False"),
        ({"strategy": kdist.AllReduce(sync_every=2)}, "sync_every=2"),
    ],
)
def test_micro_batches_with_what_contradicts_them(other, text):
    with pytest.raises(StrategyError, match=f"Received: micro_batches=4 and {text}"):
        _arguments.check({**DEFAULTS, "micro_batches": 4, **other}, {})


def test_micro_batches_by_a_variable():
    assert _arguments.with_environment(DEFAULTS, {"KDIST_MICRO_BATCHES": "4"})["micro_batches"] == 4


def test_a_misspelled_variable_is_named():
    env = {"KDIST_SCALE_LEARNING": "1", "KDIST_STRATGY": "mpi", "KDIST_STRATEGY": "mpi", "KDIST_TEST_CACHE": "x"}
    assert _arguments.misspelled(env) == {"KDIST_SCALE_LEARNING": "KDIST_SCALE_LR", "KDIST_STRATGY": "KDIST_STRATEGY"}


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: kdist.scope(warm_up=3), "warmup_epochs"),  # type: ignore[call-arg]
        (lambda: kdist.AllReduce(compresion="fp16"), "compression"),  # type: ignore[call-arg]
        (lambda: kdist.ParameterServer(number_ps=3), "num_ps"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_is_told_of_with_the_one_that_was_meant(call, meant):
    with pytest.raises(TypeError, match=f"did you mean {meant}"):
        call()


def test_an_unknown_argument_that_is_like_none_is_told_of_with_all():
    with pytest.raises(TypeError, match=r"scope\(\) has no argument 'x'.*Expected one of strategy, scale_batch"):
        kdist.scope(x=1)  # type: ignore[call-arg]
