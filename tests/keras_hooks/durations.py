"""What stands at the places that the table of patches names, to compare one moment with another."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kdist.keras_hooks.patching import PATCHES, Patch, is_imported, resolved


class Place(NamedTuple):
    """An attribute of a class, of a module or of one object, and the rows of the table that allow to replace it.

    Attributes:
        owner: the class, module or object.
        value: what the owner itself has there, `None` if nothing.
        rows: list of `Patch`.
    """

    owner: Any
    value: Any
    rows: list[Patch]


Places = Mapping[tuple[int, str], Place]
"""By the owner's `id` and the attribute's name."""


def places() -> Places:
    """Returns all places that the table names: of each class and module, and of each object that is alive."""
    found: dict[tuple[int, str], Place] = {}
    rows_of: dict[type, list[Patch]] = {}  # by an object's class
    rows = [(row, resolved(row.owner)) for row in PATCHES if is_imported(row)]
    for row, owner in rows:
        if row.place != "instance":
            for each in [owner, *(_subclasses(owner) if row.place == "class" else ())]:
                _add(found, each, [row])
    for each in gc.get_objects():
        cls = type(each)
        if cls not in rows_of:
            rows_of[cls] = [row for row, owner in rows if row.place == "instance" and issubclass(cls, owner)]
        _add(found, each, rows_of[cls])
    return found


def _add(found: dict[tuple[int, str], Place], owner: Any, rows: list[Patch]) -> None:
    for row in rows:
        for name in row.names:
            value = type(owner) if name == "__class__" else vars(owner).get(name)
            found.setdefault((id(owner), name), Place(owner, value, [])).rows.append(row)


def _subclasses(owner: type) -> Iterator[type]:
    for each in owner.__subclasses__():
        yield each
        yield from _subclasses(each)


def changed(before: Places, after: Places) -> dict[str, set[str]]:
    """Returns what differs of what was there before: how long the table allows to replace it, by owner and name."""
    found: dict[str, set[str]] = {}
    for key, place in before.items():
        if key in after and after[key].value is not place.value:
            owner = place.owner if isinstance(place.owner, (type, types.ModuleType)) else type(place.owner)
            found.setdefault(f"{owner.__name__}.{key[1]}", set()).update(row.until for row in place.rows)
    return found
