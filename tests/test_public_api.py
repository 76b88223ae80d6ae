"""The public names: all that `__all__` promises is there, in the order and in the places that are written down."""

import importlib
import pkgutil
import types

import pytest

import kdist
import kdist.errors


def unresolved(package: types.ModuleType) -> list[str]:
    """Returns what a package promises in `__all__` and does not have."""
    return [name for name in package.__all__ if not hasattr(package, name)]


def unsorted(package: types.ModuleType) -> bool:
    return list(package.__all__) != sorted(set(package.__all__))


def packages() -> list[str]:
    found = ["kdist", *(name.name for name in pkgutil.walk_packages(kdist.__path__, "kdist."))]
    return [name for name in found if hasattr(importlib.import_module(name), "__all__")]


@pytest.mark.parametrize("name", packages())
def test_all_is_sorted_and_resolves(name):
    package = importlib.import_module(name)
    assert not unsorted(package)
    assert unresolved(package) == []


def test_the_check_sees_what_is_missing_or_out_of_order():
    broken = types.ModuleType("broken")
    broken.here, broken.__all__ = 1, ["here", "gone"]
    assert unresolved(broken) == ["gone"]
    assert unsorted(broken)


def test_the_promise():
    """design.md 1, as far as this version goes: a change here is a change of the public interface."""
    assert kdist.__all__ == [
        "AllReduce",
        "ClusterInfo",
        "ParameterServer",
        "TPU",
        "all_gather",
        "all_reduce",
        "barrier",
        "callbacks",
        "chief_first",
        "cluster_info",
        "errors",
        "is_chief",
        "launch",
        "local_rank",
        "local_size",
        "plan",
        "rank",
        "scope",
        "size",
        "testing",
    ]


def test_homes_hold_what_all_promises():
    modules = {"callbacks", "errors", "testing"}
    assert sorted(kdist._HOMES) == [name for name in kdist.__all__ if name not in modules]
    for name, home in kdist._HOMES.items():
        assert getattr(kdist, name) is getattr(importlib.import_module(home), name)
    for name in modules:
        assert getattr(kdist, name) is importlib.import_module(f"kdist.{name}")


def test_dir_shows_what_is_public_and_no_more():
    assert dir(kdist) == sorted([*kdist.__all__, "__version__"])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Horovod'"):
        _ = kdist.Horovod


def test_errors_are_one_tree_and_drawn():
    classes = [value for value in vars(kdist.errors).values() if isinstance(value, type)]
    assert len(classes) > 5
    for cls in classes:
        assert issubclass(cls, kdist.errors.KDistError)
        assert cls.__name__ in kdist.errors.__doc__
        builtins = [base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (object, Exception)]
        assert builtins[1:] or cls is kdist.errors.KDistError, f"{cls.__name__} derives from no builtin"
