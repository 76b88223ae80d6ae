"""What writes files or loads weights, on several ranks: methods of a model, and functions that save one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist.checkpoint.storage.whole_files import write_whole
from kdist.engines.engine import Engine
from kdist.errors import CheckpointError
from kdist.keras_hooks.files import SAVE, replaced
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.layers.stores import save_nowhere, weights_on_disk
from kdist.keras_hooks.patching import original
from kdist.sharding.row_files import all_rows_sent
from kdist.state.comparison import gather_values
from kdist.state.session import session_of
from kdist.state.variables import ModelState
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.trainer.replicated_session import ReplicatedSession


def wrappers(session: ReplicatedSession) -> dict[str, Callable[..., Any]]:
    """Returns the wrappers of a model's methods, by name."""

    def write(name: str, *args: Any, **kwargs: Any) -> Any:
        return _write(session.strategy, session.model, original(session.model, name), *args, **kwargs)

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        # If only some ranks load, the others get these weights by broadcast.
        for each in session.of_shared_weights():
            each.votes.cast("weights")
        session.has_loaded_state = session.has_loaded_state or name == "load_weights"
        return original(session.model, name)(*args, **kwargs)

    writing = {name: functools.partial(write, name) for name in ("save", "save_weights", "export")}
    return {**writing, **{name: functools.partial(load, name) for name in ("set_weights", "load_weights")}}


@contextlib.contextmanager
def whole_files(strategy: AllReduceStrategy) -> Iterator[None]:
    """Makes `keras.saving.save_model`, `tf.saved_model.save` and the like write as a model's methods do."""

    def wrap(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def write(*args: Any, **kwargs: Any) -> Any:
            saved = next(iter(inspect.signature(save).bind(*args, **kwargs).arguments.values()))
            return _write(strategy, saved, save, *args, **kwargs)

        return write

    with weights_on_disk(_has_parts), contextlib.ExitStack() as stack:
        for place in SAVE:
            stack.enter_context(replaced(place, wrap))
        yield


def _write(strategy: AllReduceStrategy, saved: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session = session_of(saved) if isinstance(saved, keras.Model) else None
    in_parts = isinstance(saved, keras.Model) and _has_parts(saved)
    given = inspect.signature(save).bind(*args, **kwargs).arguments
    path, skipped = str(given.get("filepath", "")), given.get("objects_to_skip") or ()
    takes_parts = in_parts and bool(path) and save.__name__ != "export"
    if takes_parts and path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
        raise CheckpointError(
            f"State in parts does not fit in the format HDF5 of whole models, which takes all of it at once. "
            f"Received: {path!r}. Expected a name that ends in .keras or .weights.h5. Fix: change the name."
        )
    if isinstance(session, ReplicatedSession) and session.running_methods and not session.writes:
        if takes_parts:
            save_nowhere(saved, skipped)  # sends this rank's parts
        return None  # in a callback: the chief saves the same
    is_in_method = isinstance(session, ReplicatedSession) and bool(session.running_methods)
    # Where `model.save` calls `saving_lib.save_model` the engine is that of one rank: see `no_sync` below.
    is_sent = takes_parts and strategy.engine.size > 1 and not is_in_method
    if is_sent and not _writes(strategy.engine, save.__name__, path):
        save_nowhere(saved, skipped)
        strategy.engine.barrier()
        return None
    variables = [each for each in getattr(saved, "variables", ()) if table_of(each) is None]
    with contextlib.ExitStack() as stack:
        if is_sent:
            stack.callback(strategy.engine.barrier)  # the other ranks of the host may read the file
        if is_sent or (takes_parts and is_in_method):
            stack.enter_context(all_rows_sent(saved, skipped))
        # A graph that is saved runs in one process: `kdist.all_gather` leaves it alone.
        stack.enter_context(strategy.extended.no_sync())
        return write_whole(lambda path: strategy.versions.next(path, variables), save, *args, **kwargs)


def _writes(engine: Engine, method: str, path: str) -> bool:
    """Returns whether this rank is the first of its host to write a file.

    Collective: every rank must call this, in the same order.
    """
    files = gather_values(engine, f"{method} of a model with state in parts", [platform.node(), os.path.abspath(path)])
    return files.index(files[engine.rank]) == engine.rank


def _has_parts(model: keras.Model) -> bool:
    return ModelState(model).is_in_parts
