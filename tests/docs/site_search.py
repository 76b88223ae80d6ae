"""The search of the built guide, as its page does it in the browser: by the index that Sphinx writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

# What Sphinx' searchtools.js gives for a word in a title, in the text, for words that contain it, and for main entries.
_TITLE, _PART_OF_TITLE, _TEXT, _PART_OF_TEXT, _ENTRY = 15, 7, 5, 2, 100
_ENGLISH = SearchEnglish({})


def read_index(site: Path) -> dict[str, Any]:
    """Returns the index of a built guide.

    Args:
        site: `Path`, the folder with its pages.
    """
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    return index


def found(index: Mapping[str, Any], search: str) -> list[str]:
    """Returns the pages that a search finds by words, titles and index, the best first. Objects are left out.

    Args:
        index: mapping, what `read_index` returned.
        search: str, what is typed.
    """
    words = [word for word in re.findall(r"\w+", search.lower()) if word not in _ENGLISH.stopwords]
    each = [_scores(index, _ENGLISH.stem(word)) for word in words]
    total = {page: max(scores[page] for scores in each) for page in (set.intersection(*map(set, each)) if each else ())}
    for title, places in index["alltitles"].items():
        if search.lower() in title.lower() and len(search) >= len(title) / 2:
            for page, _ in places:
                score = round(_TITLE * len(search) / len(title)) + (index["titles"][page] == title)
                total[page] = max(total.get(page, 0), score)
    for entry, places in index["indexentries"].items():
        if search.lower() in entry and len(search) >= len(entry) / 2:
            for page, _, is_main in places:
                if is_main:
                    total[page] = max(total.get(page, 0), round(_ENTRY * len(search) / len(entry)))
    return [index["docnames"][page] for page in sorted(total, key=lambda page: (-total[page], page))]


def _scores(index: Mapping[str, Any], word: str) -> dict[int, int]:
    """Returns the score of each page that has a word."""
    scores: dict[int, int] = {}
    for kind, whole, part in (("terms", _TEXT, _PART_OF_TEXT), ("titleterms", _TITLE, _PART_OF_TITLE)):
        terms, score = index[kind], whole
        entries = [terms[word]] if word in terms else []
        if not entries and len(word) > 2:
            entries, score = [pages for term, pages in terms.items() if word in term], part
        for entry in entries:
            for page in entry if isinstance(entry, list) else [entry]:
                scores[page] = max(scores.get(page, 0), score)
    return scores
