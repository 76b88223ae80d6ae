"""The private names of Keras that kdist uses are all known to the probe, and all there."""

import ast
import re
from pathlib import Path

import pytest

from kdist import _tf_internals, keras_hooks
from kdist.keras_hooks import patching, probe
from kdist.keras_hooks.probe import PRIVATE_NAMES, missing_names
from kdist.parameter_server.strategy import ParameterServerExtended
from kdist.strategies.all_reduce import AllReduceExtended

ROOM = Path(keras_hooks.__file__).parent


def private_names(source: str) -> set[str]:
    """Returns the private attributes of other objects that a source names, as attributes or as texts."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"_[a-z]\w+", name)}


def test_nothing_has_moved():
    assert missing_names() == []


@pytest.mark.parametrize("path", sorted(ROOM.rglob("*.py")), ids=lambda path: path.stem)
def test_the_probe_knows_every_private_name(path):
    not_of_keras = {"_replace", "_kdist_custom_steps"}
    known = {name for names in PRIVATE_NAMES.values() for name in names} | not_of_keras
    assert private_names(path.read_text()) <= known


def test_an_unknown_name_is_seen():
    assert private_names("model._moved; getattr(model, '_also')") == {"_moved", "_also"}


def test_what_has_moved_is_named(monkeypatch):
    monkeypatch.setattr(probe, "PRIVATE_NAMES", {"layer": ("_gone",)})
    lost = patching.Patch("keras.Model", ("_lost",), "instance", "", "")
    monkeypatch.setattr(probe, "PATCHES", (lost, patching.Patch("keras.src.nowhere.Thing", ("x",), "class", "", "")))
    assert missing_names() == ["_gone of Dropout", "keras.Model._lost", "keras.src.nowhere.Thing"]


def test_nothing_of_tensorflow_has_moved():
    assert _tf_internals.missing_names() == []


def test_what_has_moved_in_tensorflow_is_named(monkeypatch):
    monkeypatch.setattr(_tf_internals, "SCATTERS", ("scatter_gone",))
    (said,) = _tf_internals.missing_names()
    assert said.endswith("BaseResourceVariable'>.scatter_gone")


@pytest.mark.parametrize("extended", [AllReduceExtended, ParameterServerExtended])
def test_the_probe_knows_every_method_that_a_strategy_overrides(extended):
    theirs = {name for base in extended.__mro__[1:] if base.__module__.startswith("tensorflow.") for name in vars(base)}
    overridden = {name for name in vars(extended) if re.fullmatch(r"_[a-z]\w+", name)} & theirs
    assert overridden - {"_create_variable_round_robin"} <= set(_tf_internals.OVERRIDDEN)
