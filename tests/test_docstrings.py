"""Docstrings: everything public has one, what it says of arguments is true, collectives say so, examples run."""

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import kdist
from tests.docs.test_prose import private_words_of_plain
from tests.test_architecture import sources

COLLECTIVE = "Collective: every rank must call this, in the same order."

# Functions that exchange something with all other ranks, by module.
COLLECTIVES = {
    "kdist._process": ["barrier", "chief_first"],
    "kdist._scope": ["scope"],
    "kdist.engines.engine": [
        "Engine.allreduce",
        "Engine.reduce_scatter",
        "Engine.allgather",
        "Engine.alltoall",
        "Engine.alltoallv",
        "Engine.group",
        "Engine.broadcast",
        "Engine.barrier",
        "Engine.gather_objects",
        "Engine.broadcast_object",
    ],
    "kdist.engines.mesh": ["Mesh"],
    "kdist.state.broadcast": ["broadcast_state"],
    "kdist.state.comparison": ["check_agreement", "first_difference", "check_equal"],
    "kdist.state.random_state": ["agree_random_state"],
    "kdist.state.metrics": ["add_over_ranks"],
    "kdist.callbacks.metric_average": ["MetricAverage"],
    "kdist.callbacks.nan_policy": ["NaNPolicy"],
    "kdist.callbacks.replica_check": ["ReplicaCheck", "ReplicaCheck.check"],
    "kdist.callbacks.throughput": ["Throughput"],
}

# Modules whose examples are run; those of the others need a job, and are run by the tests of docs/.
WITH_EXAMPLES = [
    "kdist.scaling",
    "kdist.data.sharding",
    "kdist.cluster",
    "kdist.strategies.selection",
    "kdist.callbacks.learning_rate_schedule",
    "kdist.callbacks.throughput",
]

Definition = ast.ClassDef | ast.FunctionDef


def public(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yields public classes, functions and methods with their names; not those inside of functions."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
        for node in body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(tree.body, "")


def parameters(node: Definition) -> list[str] | None:
    """Returns the names of what a function takes, or of what a class is made with, if that is written there."""
    if isinstance(node, ast.ClassDef):
        (init, *_) = [item for item in node.body if getattr(item, "name", "") == "__init__"] or [None]
        if init is None:
            return None
        node = init
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")]


def documented(text: str) -> list[str]:
    """Returns the names in the section `Args:` of a cleaned docstring."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    return re.findall(r"^    (\w+): ", section.group(1), re.MULTILINE) if section else []


def complaints(module: str, source: str) -> list[str]:
    """Returns what is wrong with a module's docstrings."""
    tree = ast.parse(source)
    wrong = [] if ast.get_docstring(tree) else [f"{module} has no docstring"]
    found = dict(public(tree))
    for name, node in found.items():
        text = ast.get_docstring(node) or ""
        first, *rest = text.split("\n")
        if not first.endswith(".") or (rest and rest[0]):
            wrong.append(f"{module}.{name} does not begin with one line that ends with a full stop")
        told, taken = documented(text), parameters(node)
        if told and taken is not None and told != taken:
            wrong.append(f"{module}.{name} documents {told} and takes {taken}")
    for name in COLLECTIVES.get(module, []):
        if name not in found or COLLECTIVE not in (ast.get_docstring(found[name]) or "").split("\n"):
            wrong.append(f"{module}.{name} is a collective and does not say so")
    return wrong


@pytest.mark.parametrize("module", sources())
def test_docstrings(module):
    assert complaints(module, sources()[module]) == []


def test_collectives_are_where_they_are_expected():
    assert COLLECTIVES.keys() <= sources().keys()


def test_what_is_wrong_is_seen():
    source = '''
def silent(): pass

class Box:
    """A box.

    Args:
        size: int.
    """

    def __init__(self, length): pass

    def barrier(self):
        """Waits for all
        """

    def _hidden(self): pass
'''
    said = complaints("kdist.engines.engine", source)
    for words in [
        "engine has no docstring",
        "engine.silent does not begin",
        "engine.Box documents ['size'] and takes ['length']",
        "engine.Box.barrier does not begin",
        "engine.Engine.barrier is a collective and does not say so",
    ]:
        assert any(words in line for line in said), said
    assert not any("_hidden" in line for line in said)


# What the source calls what ranks agree on with a step, and a package, in the names of its parts.
NAMES_OF_PARTS = {"vote", "room"}


def texts(source):
    """Returns the docstrings of a module, and its other texts of several words: messages, most of them."""
    docstrings, others = [], []
    seen = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docstrings.append(str(child.value.value))
                seen.add(child.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in seen and " " in node.value:
            others.append(node.value)
    return docstrings, others


@pytest.mark.parametrize("module", sources())
def test_words_are_those_of_the_field(module):
    docstrings, others = texts(sources()[module])
    found = {word for text in docstrings for word in private_words_of_plain(text)} - NAMES_OF_PARTS
    if module != "kdist.keras_hooks.patching":  # whose texts are those of a table in ARCHITECTURE.md
        found |= {word for text in others for word in private_words_of_plain(text)}
    assert found == set()


def on_the_reference_page():
    """Yields what users can name, and the public parts of it."""
    for space in (kdist, kdist.callbacks, kdist.errors, kdist.testing):
        yield from (getattr(space, name) for name in getattr(space, "__all__", vars(space)) if name[0] != "_")


def test_words_of_the_reference_are_those_of_the_field():
    docs = [inspect.getdoc(each) or "" for each in on_the_reference_page() if inspect.isclass(each) or callable(each)]
    assert len(docs) > 40
    assert [word for text in docs for word in private_words_of_plain(text)] == []


def test_words_of_docstrings_and_messages_are_seen():
    docstrings, others = texts('"""A vote."""\n\ndef f(x):\n    """Anew."""\n    raise ValueError(f"The kin {x}")\n')
    assert [private_words_of_plain(text) for text in docstrings] == [["vote"], ["anew"]]
    assert [private_words_of_plain(text) for text in others] == [["kin"]]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_run(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0


def test_an_example_that_is_wrong_fails():
    parsed = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(parsed, out=lambda _: None).failed == 1
