"""The README and the guide as prose: what is not code, in sentences, headings and links."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from tests.docs import guide
from tests.helpers import spmd

README = spmd.ROOT / "README.md"
PAGES = {"README": README, **guide.PAGES}
OTHER_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")

_FENCE = re.compile(r"^( *)```.*?^\1```$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`+)(?!`).+?\1")
_LIST_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ")


def without_code(text: str) -> str:
    """Returns a page with empty lines where its fences and comments are."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def lines_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Yields number, from 1, and text of each line in a fence."""
    for start, body in guide.fences(text, "", "python", "py", "sh", "bash"):
        yield from enumerate(body.splitlines(), start + 1)


def paragraphs(text: str) -> Iterator[str]:
    """Yields headings, paragraphs, list items and cells of tables, as plain text: code is one word."""
    for block in re.split(r"\n\s*\n", without_code(text)):
        lines: list[str] = []
        for line in block.splitlines():
            if line.lstrip().startswith("|"):
                yield from map(_plain, re.split(r"(?<!\\)\|", line.strip().strip("|")))
            elif (line.startswith("#") or _LIST_ITEM.match(line)) and lines:
                yield _plain(" ".join(lines))
                lines = [line]
            else:
                lines.append(line)
        if lines:
            yield _plain(" ".join(lines))


def _plain(text: str) -> str:
    text = _CODE.sub("code", _LINK.sub(r"\1", text))
    return re.sub(r"^[#\s>*-]+|\*\*", "", text).strip()


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a page, those in tables and lists too."""
    for paragraph in paragraphs(text):
        yield from filter(None, re.split(r"(?<=[^.][.?!])\)?\s+", paragraph))


def words(sentence: str) -> list[str]:
    """Returns the words of a sentence: what has a letter or a digit."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def headings(text: str) -> list[str]:
    """Returns the title of a page and of its sections, without markup."""
    return [line.lstrip("#").strip().replace("`", "") for line in without_code(text).splitlines() if line[:1] == "#"]


def anchors(text: str) -> set[str]:
    """Returns what a link to a section of a page may end with."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def local_links(text: str) -> list[str]:
    """Returns the targets of a page's links and pictures that are no addresses."""
    found = [target for _, target in _LINK.findall(without_code(text))]
    return [target for target in found if not re.match(r"\w+:", target)]


def addresses(text: str) -> list[str]:
    """Returns the web addresses that a page links to, or has in its text."""
    linked = [target for _, target in _LINK.findall(without_code(text)) if re.match(r"\w+:", target)]
    return linked + re.findall(r"(?<!\()https?:[^\s<>)`]+", _CODE.sub("", without_code(text)))


def is_well_formed(address: str) -> bool:
    """Returns whether a web address is encrypted, has a host with a domain, and ends with no mark of a sentence."""
    parts = urllib.parse.urlsplit(address)
    host = parts.hostname or ""
    return parts.scheme == "https" and "." in host.strip(".") and not re.search(r"[.,;:]$|//", address[8:])


def leads_somewhere(page: Path, target: str) -> bool:
    """Returns whether a link of a page leads to a file, and to a heading of it."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or anchor in anchors(path.read_text()))
