"""The table of rooms in ARCHITECTURE.md: `python -m tests.architecture_table --write` brings it up to date.

Lines are rounded, and a table is still true when a room has grown or shrunk by a tenth: not every change touches it.
"""

from __future__ import annotations

import argparse
import sys

from tests import architecture

PAGE = architecture.KDIST.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->\n"


def measured() -> dict[str, tuple[int, int]]:
    """Returns how many files and lines each room has, and all of kdist."""
    found: dict[str, tuple[int, int]] = {}
    for module, source in architecture.sources().items():
        for name in (architecture.room(module), "all"):
            files, lines = found.get(name, (0, 0))
            found[name] = files + 1, lines + len(source.splitlines())
    return {name: found[name] for name in (*architecture.ROOMS, "all")}


def grouped(rooms: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Returns the rows of the table: rooms, neighbours of one file each in one row."""
    rows: dict[str, tuple[int, int]] = {}
    last = ""
    for name, (files, lines) in rooms.items():
        if files == 1 and last and rows[last][0] == last.count(",") + 1:
            others, more = rows.pop(last)
            name, files, lines = f"{last}, {name.removeprefix('kdist.')}", others + files, more + lines
        rows[name] = files, lines
        last = name
    return rows


def render(rooms: dict[str, tuple[int, int]]) -> str:
    """Returns the table in Markdown, lines to tens."""
    rows = [f"| {name} | {files} | {round(lines, -1)} |\n" for name, (files, lines) in rooms.items()]
    return "".join(["| room | files | lines |\n", "|---|---:|---:|\n", *rows])


def complaints(page: str, rooms: dict[str, tuple[int, int]]) -> list[str]:
    """Returns what a page's table says that is not so."""
    _, _, rest = page.partition(BEGIN)
    table, found, _ = rest.partition(END)
    if not found:
        return [f"There is no table between {BEGIN.strip()} and {END.strip()}"]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    said = {name: (int(files), int(lines)) for name, files, lines in rows}
    wrong = [] if list(said) == list(rooms) else [f"The rooms are {list(said)}, not {list(rooms)}"]
    for name in (name for name in rooms if name in said):
        (files, lines), (files_now, lines_now) = said[name], rooms[name]
        if files != files_now or abs(lines - lines_now) > max(20, lines_now // 10):
            wrong.append(f"{name} has {files_now} files and {lines_now} lines, not {files} and about {lines}")
    return wrong


def main() -> int:
    """Writes the table into the page, or says what is wrong with it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table")
    page = PAGE.read_text()
    if parser.parse_args().write:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + render(grouped(measured())) + END + rest.partition(END)[2])
        return 0
    wrong = complaints(page, grouped(measured()))
    print("\n".join(wrong) or "The table is true.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
