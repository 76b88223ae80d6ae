"""The private names of Keras that kdist uses are all known to the probe, and all there."""

import ast
import re
from pathlib import Path

import pytest

from kdist import keras_hooks
from kdist.keras_hooks import patching, probe
from kdist.keras_hooks.probe import PRIVATE_NAMES, missing_names

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


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_the_probe_knows_every_private_name(path):
    known = {name for names in PRIVATE_NAMES.values() for name in names} | {"_replace"}  # of a named tuple
    assert private_names(path.read_text()) <= known


def test_an_unknown_name_is_seen():
    assert private_names("model._moved; getattr(model, '_also')") == {"_moved", "_also"}


def test_what_has_moved_is_named(monkeypatch):
    monkeypatch.setattr(probe, "PRIVATE_NAMES", {"layer": ("_gone",)})
    lost = patching.Patch("keras.Model", ("_lost",), "instance", "", "")
    monkeypatch.setattr(probe, "PATCHES", (lost, patching.Patch("keras.src.nowhere.Thing", ("x",), "class", "", "")))
    assert missing_names() == ["_gone of Dropout", "keras.Model._lost", "keras.src.nowhere.Thing"]
