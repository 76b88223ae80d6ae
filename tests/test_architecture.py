"""The house's import directions (ARCHITECTURE.md), read from the source: a room imports only from those before it."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

KDIST = Path(__file__).parents[1] / "kdist"

# From left to right. A file belongs to the most specific of these that its module's name begins with.
ROOMS = (
    "kdist.errors",
    "kdist.scaling",
    "kdist.cluster",
    "kdist.data.sharding",
    "kdist.watch",
    "kdist._tf_internals",
    "kdist.engines",
    "kdist.launch",
    "kdist.install",
    "kdist.data",
    "kdist.gradients",
    "kdist.strategies",
    "kdist.training",
    "kdist.callbacks",
    "kdist.testing",
    "kdist._process",
    "kdist._arguments",
    "kdist._scope",
    "kdist",  # `__init__`: it names what the user sees
    "kdist.cli",
)

# Libraries that few may name, and who these are.
GUARDED = {
    "mpi4py": ["kdist.engines.mpi"],
    "horovod": ["kdist.engines.horovod"],
    "tensorflow.python": ["kdist._tf_internals"],
    "keras.src": ["kdist.training._keras_internals"],
}

# Rooms that do without some libraries, even inside of functions.
WITHOUT = {
    "kdist.errors": ["tensorflow", "keras", "numpy"],
    "kdist.scaling": ["tensorflow", "keras", "numpy"],
    "kdist.cluster": ["tensorflow", "keras", "numpy"],
    "kdist.launch": ["tensorflow", "keras", "numpy"],
    "kdist.watch": ["tensorflow", "keras", "numpy"],
    "kdist.data.sharding": ["tensorflow", "keras"],
    "kdist.engines": ["keras"],
    "kdist.gradients": ["keras"],
}


@functools.cache
def sources() -> dict[str, str]:
    """Returns the text of each module by its name."""
    found = {}
    for path in sorted(KDIST.rglob("*.py")) + sorted((KDIST / "callbacks").glob("*.py")):
        parts = path.relative_to(KDIST.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


def begins(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(module: str) -> str:
    return max((room for room in ROOMS if begins(module, room)), key=len)


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """Yields the full name of all that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, from {'.' * node.level}{node.module or ''}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """Returns what a module's source does that its place in the house does not allow."""
    tree = ast.parse(source)
    here = room(module)
    wrong = []
    for name in imported(module, tree):
        if begins(name, "kdist") and ROOMS.index(room(name)) > ROOMS.index(here):
            wrong.append(f"{module} imports {name}, which stands to its right")
        for library, allowed in GUARDED.items():
            if begins(name, library) and module not in allowed:
                wrong.append(f"{module} names {library}, which only {', '.join(allowed)} may")
        wrong += [f"{module} does without {lib}" for lib in WITHOUT.get(here, []) if begins(name, lib)]
    for node in ast.walk(tree):
        prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if prints and here != "kdist.cli":
            wrong.append(f"{module} prints, in line {node.lineno}: only cli does")
    return wrong


@pytest.mark.parametrize("module", sources())
def test_imports_follow_the_house(module):
    assert not violations(module, sources()[module])


def test_the_rooms_are_all_there():
    modules = sources()
    assert len(modules) > 40
    # All that is named must exist, or a rule is about nothing.
    names = {*ROOMS, *WITHOUT, *(name for allowed in GUARDED.values() for name in allowed)}
    assert names <= modules.keys()


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("kdist.errors", "from kdist import scaling", "to its right"),
        ("kdist.cluster.mpi", "def f():\n    from kdist.engines.mpi import MPIEngine", "to its right"),
        ("kdist.data.arrays", "import kdist.training.step", "to its right"),
        ("kdist.training.step", "import kdist", "to its right"),
        ("kdist._process", "from mpi4py import MPI", "only kdist.engines.mpi may"),
        ("kdist.training.step", "from tensorflow.python.eager import context", "only kdist._tf_internals"),
        ("kdist.training.step", "from keras import src", "only kdist.training._keras_internals"),
        ("kdist.engines.fusion", "import keras", "does without keras"),
        ("kdist.data.sharding", "import tensorflow as tf", "does without tensorflow"),
        ("kdist.training.step", "print('hello')", "only cli does"),
    ],
)
def test_a_violation_is_seen(module, source, complaint):
    (said,) = violations(module, source)
    assert complaint in said


def test_what_is_allowed_is_allowed():
    assert not violations("kdist.cli.smoke", "import kdist\nimport keras\nprint(kdist)")
    assert not violations("kdist.engines.mpi", "from mpi4py import MPI\nfrom kdist.errors import EngineError")
    assert not violations("kdist.data.tf_data", "import tensorflow as tf\nfrom kdist.data.sharding import Plan")
