"""The rules of ARCHITECTURE.md, read from the source: what may import what, sizes, one door to each library."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from tests import architecture_table
from tests.architecture import ROOMS, begins, circles, graph, imported, room, sources

# Libraries that few may name, and who these are: a module, or all of a room.
GUARDED = {
    "mpi4py": ["kdist.engines.mpi"],
    "horovod": ["kdist.engines.horovod"],
    "tensorflow.python": ["kdist._tf_internals"],
    "keras.src": ["kdist.keras_hooks"],
}

# Rooms that do without some libraries, even inside of functions.
WITHOUT = {
    "kdist.errors": ["tensorflow", "keras", "numpy"],
    "kdist.scaling": ["tensorflow", "keras", "numpy"],
    "kdist.cluster": ["tensorflow", "keras", "numpy"],
    "kdist.reports": ["tensorflow", "keras", "numpy"],
    "kdist.launchers": ["tensorflow", "keras", "numpy"],
    "kdist.restarts": ["tensorflow", "keras", "numpy"],
    "kdist.watch": ["tensorflow", "keras", "numpy"],
    "kdist.data.sharding": ["tensorflow", "keras"],
    "kdist.engines.arrays": ["tensorflow", "keras"],
    "kdist.engines.tensors": ["keras"],
    "kdist.engines": ["keras"],
    "kdist.gradients": ["keras"],
}

# Rooms that do not know each other, wherever they stand.
BESIDE = ("kdist.trainer", "kdist.parameter_server", "kdist.tf_strategies", "kdist.callbacks")

MAX_FILES, MAX_LINES = 18, 2100  # of a room

# Private names that Keras' objects have and those of another library too, which a room uses.
NOT_OF_KERAS = {
    "kdist.data": {"_batch_size", "_inputs"},  # datasets of tf.data
    "kdist.data.graphs": {"_batch_size", "_inputs", "_start", "_step"},
}


# Where a class of Keras writes one: a method, or an attribute of itself.
PRIVATE = re.compile(r"(?:\bself\.|^ +def )(_(?!_)\w+)", re.MULTILINE)


def violations(module: str, source: str) -> list[str]:
    """Returns what a module's source does that its place in the house does not allow."""
    tree = ast.parse(source)
    here = room(module)
    wrong = []
    for name in imported(module, tree):
        if begins(name, "kdist") and ROOMS.index(room(name)) > ROOMS.index(here):
            wrong.append(f"{module} imports {name}, which stands to its right")
        elif begins(name, "kdist") and here in BESIDE and room(name) in BESIDE and room(name) != here:
            wrong.append(f"{module} imports {name}, which stands beside it")
        for library, allowed in GUARDED.items():
            if begins(name, library) and not any(begins(module, each) for each in allowed):
                wrong.append(f"{module} names {library}, which only {', '.join(allowed)} may")
        wrong += [f"{module} does without {lib}" for lib in WITHOUT.get(here, []) if begins(name, lib)]
    for node in ast.walk(tree):
        prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if prints and not begins(here, "kdist.cli"):
            wrong.append(f"{module} prints, in line {node.lineno}: only cli does")
    return wrong


@functools.cache
def private_names_of_keras() -> frozenset[str]:
    """Returns the attributes and methods that classes of the installed Keras keep for themselves."""
    (package,) = importlib.util.find_spec("keras").submodule_search_locations
    sources_of_keras = [path.read_text() for path in Path(package, "src").rglob("*.py")]
    return frozenset(name for text in sources_of_keras for name in PRIVATE.findall(text))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def uses_of_private_names(module: str, source: str) -> list[str]:
    """Returns where a module uses a private name of Keras' objects: of another object, or as a string."""
    names = private_names_of_keras() - NOT_OF_KERAS.get(room(module), set())
    wrong = []
    for node in ast.walk(ast.parse(source)):
        used = None
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            used = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used = node.value
        if used in names and not begins(room(module), "kdist.keras_hooks"):
            wrong.append(f"{module} uses {used} of Keras in line {node.lineno}, which only kdist.keras_hooks may")
    return wrong


@pytest.mark.parametrize("module", sources())
def test_imports_follow_the_house(module):
    wrong = violations(module, sources()[module])
    assert wrong == []


@pytest.mark.parametrize("module", sources())
def test_private_names_of_keras_are_used_in_one_room(module):
    wrong = uses_of_private_names(module, sources()[module])
    assert wrong == []


def test_there_are_no_circles():
    found = circles(graph(sources()))
    assert found == []


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_are_small(name):
    files, lines = architecture_table.measured()[name]
    assert files <= MAX_FILES
    assert lines <= MAX_LINES


def test_the_table_of_rooms_is_true():
    """`python -m tests.architecture_table --write` writes it."""
    assert not architecture_table.complaints(
        architecture_table.PAGE.read_text(), architecture_table.grouped(architecture_table.measured())
    )


def paths_not_there(page: str) -> list[str]:
    """Returns the paths in backticks of a page of Markdown that the checkout does not have."""
    paths = re.findall(r"`((?:kdist|callbacks|tests|docs)/[^`\s]*)`", page)
    assert paths
    return [path for path in paths if not (architecture_table.PAGE.parent / path).exists()]


def test_the_files_that_contributors_are_sent_to_exist():
    wrong = paths_not_there((architecture_table.PAGE.parent / "CONTRIBUTING.md").read_text())
    assert wrong == []
    assert paths_not_there("in `kdist/engines/no_such_engine.py` or `kdist/cli/`") == [
        "kdist/engines/no_such_engine.py"
    ]


def test_the_rooms_are_all_there():
    modules = sources()
    assert len(modules) > 40
    # All that is named must exist, or a rule is about nothing.
    names = {*ROOMS, *WITHOUT, *BESIDE, *NOT_OF_KERAS, *(name for allowed in GUARDED.values() for name in allowed)}
    assert names <= modules.keys()
    assert all(allowed <= private_names_of_keras() for allowed in NOT_OF_KERAS.values())


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("kdist.errors", "from kdist import scaling", "to its right"),
        ("kdist.cluster.mpi", "def f():\n    from kdist.engines.mpi import MPIEngine", "to its right"),
        ("kdist.data.arrays", "import kdist.step.step", "to its right"),
        ("kdist.step.step", "import kdist", "to its right"),
        ("kdist.step.step", "if TYPE_CHECKING:\n    from kdist.trainer import feed", "to its right"),
        ("kdist.callbacks.throughput", "from kdist.trainer import feed", "beside it"),
        ("kdist._process", "from mpi4py import MPI", "only kdist.engines.mpi may"),
        ("kdist.step.step", "from tensorflow.python.eager import context", "only kdist._tf_internals"),
        ("kdist.step.step", "from keras import src", "only kdist.keras_hooks"),
        ("kdist.engines.arrays.fusion", "import keras", "does without keras"),
        ("kdist.data.sharding", "import tensorflow as tf", "does without tensorflow"),
        ("kdist.step.step", "print('hello')", "only cli does"),
    ],
)
def test_a_violation_is_seen(module, source, complaint):
    (said,) = violations(module, source)
    assert complaint in said


@pytest.mark.parametrize(
    "line",
    [
        "optimizer._iterations",
        "self.model._initial_epoch = 3",
        "super()._enumerate_iterator()",
        "getattr(metric, '_metrics', [])",
        "patched(model, '_make_function', made)",
    ],
)
def test_a_private_name_of_keras_is_seen(line):
    (said,) = uses_of_private_names("kdist.step.step", line)
    assert "in line 1, which only kdist.keras_hooks may" in said
    assert not uses_of_private_names("kdist.keras_hooks.internals", line)


@pytest.mark.parametrize(
    "line", ["self._iterations", "os._exit(1)", "dataset._input_dataset", "'of optimizer._iterations'", "model.fit()"]
)
def test_other_names_are_no_private_names_of_keras(line):
    assert not uses_of_private_names("kdist.step.step", line)


def test_a_circle_is_seen():
    modules = {
        "kdist": "from kdist.a import x",
        "kdist.a": "if TYPE_CHECKING:\n    from kdist.b import B",
        "kdist.b": "def f():\n    import kdist.c",
        "kdist.c": "from kdist import a",
        "kdist.d": "from kdist import a, b",
    }
    assert circles(graph(modules)) == [["kdist.a", "kdist.b", "kdist.c"]]


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ({"kdist.a": (3, 460), "kdist.b": (1, 96), "all": (4, 556)}, "kdist.a has 3 files and 460 lines, not 3 and"),
        ({"kdist.a": (3, 400), "kdist.b": (2, 96), "all": (5, 496)}, "kdist.b has 2 files"),
        ({"kdist.a": (3, 400), "kdist.c": (1, 96), "all": (4, 496)}, "The rooms are"),
    ],
)
def test_a_table_that_is_not_true_is_seen(now, complaint):
    rooms = {"kdist.a": (3, 396), "kdist.b": (1, 96), "all": (4, 492)}
    page = f"text\n{architecture_table.BEGIN}{architecture_table.render(rooms)}{architecture_table.END}text\n"
    assert not architecture_table.complaints(page, rooms)
    assert any(complaint in each for each in architecture_table.complaints(page, now))


def test_the_page_is_short():
    lines = architecture_table.PAGE.read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120]


# How many files a walk may pass, so that a newcomer follows it.
WALKS = {"The way of a batch": 12, "The way of a gradient": 8, "The way of a checkpoint": 8}


def files_of_a_walk(page: str, title: str) -> set[str]:
    """Returns the paths in the numbered list of a section."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", section, re.MULTILINE)
    return set(re.findall(r"`([\w/]+\.py)`", "\n".join(steps)))


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_short(title):
    assert 0 < len(files_of_a_walk(architecture_table.PAGE.read_text(), title)) <= WALKS[title]


def test_the_files_of_a_walk_are_counted():
    page = "## The way of a batch\n\n1. `a/b.py`: x,\n   `c.py`.\n2. `a/b.py`, `d.py`\n\n`e.py`\n\n## B\n\n1. `f.py`\n"
    assert files_of_a_walk(page, "The way of a batch") == {"a/b.py", "c.py", "d.py"}


def test_a_page_without_a_table_is_seen():
    assert architecture_table.complaints("text\n", {}) != []


def test_what_is_allowed_is_allowed():
    assert not violations("kdist.cli.smoke", "import kdist\nimport keras\nprint(kdist)")
    assert not violations("kdist.engines.mpi", "from mpi4py import MPI\nfrom kdist.errors import EngineError")
    assert not violations("kdist.data.tf_data", "import tensorflow as tf\nfrom kdist.data.sharding import Plan")
    assert not violations("kdist.keras_hooks.trainer", "from keras.src import tree\nfrom kdist.engines import engine")
