"""Which tests start processes: read from the code that a test can reach. The quick tier leaves them out."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MARK = "starts_processes"

STARTERS = (
    *(subprocess.Popen, subprocess.run, subprocess.call, subprocess.check_call, subprocess.check_output),
    *(os.fork, os.system, multiprocessing.Process, venv.create),
)

AUDITED = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "pty.spawn")

_forbidden_in: list[str] = []  # the test that runs, if it must not start processes


def starts_processes(item: pytest.Function) -> bool:
    """Returns whether the code of a test, of its fixtures, of its parameters or of what these call starts processes."""
    fixtures = [each.func for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return _reaches_a_starter([item.function, *fixtures, *parameters])


def _reaches_a_starter(objects: list[Any]) -> bool:
    seen: set[int] = set()
    todo = list(objects)
    while todo:
        each = todo.pop()
        if any(each is starter for starter in STARTERS):
            return True
        if id(each) not in seen:
            seen.add(id(each))
            todo += _reached_from(each)
    return False


def _reached_from(each: Any) -> Iterator[Any]:
    """Yields what a function, a class, an object or a table names directly, if it is one of the tests or of kdist."""
    if isinstance(each, dict):
        yield from each.values()
    elif isinstance(each, (list, tuple)):
        yield from each
    elif not (getattr(each, "__module__", None) or "").startswith(("tests.", "test_", "kdist.")):
        return
    elif isinstance(each, type):
        for member in (member for base in each.__mro__ for member in vars(base).values()):
            yield getattr(member, "__func__", getattr(member, "fget", member))
    elif isinstance(each, FunctionType):
        names = {name for code in _codes(each.__code__) for name in code.co_names}
        found = [each.__globals__[name] for name in names if name in each.__globals__]
        yield from found
        for module in found:
            if isinstance(module, ModuleType):
                yield from (vars(module)[name] for name in names if name in vars(module))
        yield from (cell.cell_contents for cell in each.__closure__ or ())
    else:
        yield type(each)
    yield getattr(each, "__wrapped__", None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def forbid_while(test: str | None) -> None:
    """Lets each start of a process fail from now on while a test runs; `None` ends it."""
    _forbidden_in[:] = [test] if test else []


def install_guard() -> None:
    """Looks at each start of a process from now on; Python cannot remove the hook, which does nothing by itself."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _forbidden_in and event in AUDITED and arguments[0] != "uname":  # which h5py asks when it is first imported
        pytest.fail(
            f"{_forbidden_in[0]} starts a process ({event}: {str(arguments)[:200]}), and would do so in `--quick`.\n"
            f"Expected: the mark `{MARK}`, which tests.helpers.processes sets where it sees the start in the code.\n"
            f"Fix: start processes by tests.helpers.spmd, or put `@pytest.mark.{MARK}` on the test."
        )
