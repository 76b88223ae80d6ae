"""How the guide is built: `sphinx-build -W docs build/docs`."""

import importlib.util
import re
import textwrap
from typing import Any

import kdist

project = "kdist"
author = "the kdist authors"
release = kdist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
if importlib.util.find_spec("sphinx_copybutton"):  # an environment from before it was required builds without buttons
    extensions.append("sphinx_copybutton")
myst_heading_anchors = 3
exclude_patterns = ["build"]

html_theme = "furo"
html_title = "kdist"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "none"  # of fences that name none: what programs print

# Docstrings are Keras': Markdown's backticks and fences, and sections that napoleon knows.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Types of others, and kdist's own that are on no page.
nitpick_ignore_regex = [
    ("py:class", r"(tf|keras|collections|pathlib|os)\..*|ScopeContext|Plan|kdist\.(engines|launchers)\..*"),
]
# `sphinx-build -b linkcheck docs build/links` asks other sites. One that asks for patience gets a minute, not five.
linkcheck_timeout = 20  # seconds
linkcheck_retries = 2
linkcheck_rate_limit_timeout = 60
linkcheck_report_timeouts_as_broken = True
maximum_signature_line_length = 80  # longer ones have a line for each argument
autodoc_member_order = "bysource"


# What a search shows first: by its score alone, a word of many headings finds the page that is first in the alphabet.
_FOUND_BY = {"\n## How many ranks?\n": ("how many ranks", "number of ranks", "ranks")}


def _index_sections(app: Any, name: str, source: list[str]) -> None:
    for heading, words in _FOUND_BY.items():
        entries = ", ".join(f"! {each}" for each in words)
        source[0] = source[0].replace(heading, f"\n```{{eval-rst}}\n.. index:: {entries}\n```\n{heading}")


def _fences_become_blocks(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(lines)

    def block(found: re.Match[str]) -> str:
        body = textwrap.indent(textwrap.dedent(found["body"]), "    ")
        return textwrap.indent(f".. code-block:: python\n\n{body}\n", found["indent"])

    text = re.sub(r"^( *)Examples?:$", r"\1.. rubric:: Example\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(?P<indent> *)```python\n(?P<body>.*?)^ *```$", block, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\(\s*(https?:[^)\s]+)\)", r"`\1 <\2>`__", text)
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Registers what turns Markdown in docstrings into Sphinx' own markup, before napoleon reads the sections.

    So is what adds entries to the index of the search.
    """
    app.connect("source-read", _index_sections)
    app.connect("autodoc-process-docstring", _fences_become_blocks, priority=100)
