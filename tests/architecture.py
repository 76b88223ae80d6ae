"""kdist's source as a graph: modules, the rooms that they belong to, and what imports what."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

KDIST = Path(__file__).parents[1] / "kdist"

# From left to right. A file belongs to the most specific of these that its module's name begins with.
ROOMS = (
    "kdist.errors",
    "kdist.scaling",
    "kdist._user_code",
    "kdist._suggestions",
    "kdist.cluster",
    "kdist.data.sharding",
    "kdist.restarts",
    "kdist.watch",
    "kdist._tf_internals",
    "kdist.engines.arrays",
    "kdist.engines.tensors",
    "kdist.engines",
    "kdist.keras_hooks",
    "kdist.keras_hooks.fit",
    "kdist.keras_hooks.layers",
    "kdist.reports",
    "kdist.healing",
    "kdist.launchers.hosts",
    "kdist.launchers",
    "kdist.launchers.functions",
    "kdist.install",
    "kdist.state.graphs",
    "kdist.state.rows",
    "kdist.state",
    "kdist.data.graphs",
    "kdist.data.pipelines",
    "kdist.data",
    "kdist.gradients",
    "kdist.strategies",
    "kdist.checkpoint.storage",
    "kdist.checkpoint",
    "kdist.learning_rate",
    "kdist.step.losses",
    "kdist.step",
    "kdist.sharding",
    "kdist.trainer.feeding",
    "kdist.trainer",
    "kdist.parameter_server",
    "kdist.tf_strategies",
    "kdist.callbacks",
    "kdist.planning",
    "kdist.testing",
    "kdist._engine",
    "kdist._process",
    "kdist._arguments",
    "kdist._scope_context",
    "kdist._unscoped_fit",
    "kdist._strategy_scopes",
    "kdist._scope",
    "kdist",  # `__init__`: it names what the user sees
    "kdist.cli.jobs",
    "kdist.cli",
)


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
    """Yields the full name of all that a module imports, wherever in it, under `TYPE_CHECKING` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, from {'.' * node.level}{node.module or ''}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns which of some modules each of them imports.

    What Python runs besides, the `__init__` of each package on the way, does not count.
    """
    found = {}
    for module, source in modules.items():
        homes = (_home(name, modules) for name in imported(module, ast.parse(source)))
        found[module] = {home for home in homes if home not in (None, module)}
    return found


def _home(name: str, modules: Mapping[str, str]) -> str | None:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or by others of the group."""
    reached = {module: _reached(module, imports) for module in imports}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return sorted(sorted(group) for group in groups if group)


def _reached(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [module]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo += new
    return found
