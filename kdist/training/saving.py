"""A model's own `save`, `save_weights` and `export` on several ranks: files appear whole, whoever writes them."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist.training.replicated_model import ReplicatedModel


def wrappers(owner: ReplicatedModel) -> dict[str, Callable[..., Any]]:
    """Returns what stands in front of a model's own methods for files and weights, by name."""

    def write(name: str, *args: Any, **kwargs: Any) -> Any:
        if owner.is_running and not owner.writes:
            return None  # called by a callback: the chief saves the same
        return write_whole(getattr(type(owner.model), name).__get__(owner.model), *args, **kwargs)

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        # The others are to have these weights too, should this be done on some ranks only.
        owner.requests.ask("weights")
        return getattr(type(owner.model), name).__get__(owner.model)(*args, **kwargs)

    writing = {name: functools.partial(write, name) for name in ("save", "save_weights", "export")}
    return {**writing, **{name: functools.partial(load, name) for name in ("set_weights", "load_weights")}}


def write_whole(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Writes under a temporary name in the same directory, and renames when all is written.

    Whoever reads finds what was there before, or all of the new: also where every rank of a job writes the same file at
    once. What is cut off, by a full disk or a killed process, never takes the place of what was there.

    Args:
        write: callable with a first parameter `filepath`: a file or a directory, or the first of several files.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    bound = inspect.signature(write).bind(*args, **kwargs)
    path = os.fspath(bound.arguments["filepath"])
    folder, name = os.path.split(path)
    asks_before = bound.arguments.get("overwrite") is False and os.path.exists(path)
    if "://" in path or not os.path.isdir(folder or ".") or asks_before:
        return write(*args, **kwargs)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder or ".") as scratch:
        bound.arguments["filepath"] = os.path.join(scratch, name)
        result = write(*bound.args, **bound.kwargs)
        # What names the other files of a sharded model comes last.
        for each in sorted(os.listdir(scratch), key=lambda each: (each == name, each)):
            _put(Path(scratch, each), Path(folder, each))
    return result


def _put(source: Path, target: Path) -> None:
    if not source.is_dir():
        os.replace(source, target)
        return
    while True:  # another rank may put its own there at the same time
        try:
            os.rename(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as old:
            try:
                os.rename(target, Path(old, "replaced"))
            except FileNotFoundError:
                continue
