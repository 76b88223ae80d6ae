"""The guide keeps its word: it builds without a warning, its snippets run, and it names all that there is."""

import argparse
import inspect
import re
import shlex
import subprocess
import sys

import pytest

import kdist
from kdist.cli.main import make_parser
from kdist.strategies.options import TPU, AllReduce, ParameterServer
from tests.docs import guide, site_search
from tests.docs.test_prose import SEARCHES
from tests.helpers import spmd

RESULTS = 5  # of a search, that a reader sees at once
TARGET = "tests.docs.snippet_cases:CASES"
TEXT = "\n".join(path.read_text() for path in guide.PAGES.values())


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(TARGET, 2, env=spmd.WITH_SKLEARN, only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_snippets(launched, case):
    launched.check(case)


def test_what_is_only_shown_is_python():
    for name, path in guide.PAGES.items():
        for line, code in guide.fences(path.read_text(), "py"):
            compile("\n" * line + code, name, "exec")


def test_fences_are_found():
    text = "a\n```python\nx = 1\n```\n<!-- before\ny = 2\n-->\n```\nno code\n```\n```py\nz = 3\n```\n"
    assert list(guide.fences(text, "python", "before")) == [(2, "x = 1\n"), (5, "y = 2\n")]
    assert list(guide.fences(text, "py")) == [(11, "z = 3\n")]
    assert len(guide.scripts()) >= 10


def build(source, folder):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-n", "-b", "html", str(source), str(folder)]
    return spmd.execute(command, env={"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}, timeout=300)


def test_the_guide_builds_without_a_warning(tmp_path):
    done = build(guide.FOLDER, tmp_path)
    assert done.returncode == 0, done.output
    written = {path.stem for path in tmp_path.glob("*.html")}
    assert set(guide.PAGES) <= written
    assert 'class="highlight-python' in (tmp_path / "reference.html").read_text()
    index = site_search.read_index(tmp_path)
    assert len(SEARCHES) >= 30
    late = {search: page for search, page in SEARCHES.items() if page not in site_search.found(index, search)[:RESULTS]}
    assert late == {}, "the site's search shows other pages first"
    for search in ("ranks", "how many ranks", "number of ranks"):
        assert site_search.found(index, search)[0] == "performance"


def test_a_search_orders_pages_as_the_site_does():
    index = {
        "docnames": ["a", "b", "c"],
        "titles": ["Rank hangs", "Other", "Third"],
        "alltitles": {"Rank hangs": [[0, None]], "It hangs at the very start of all": [[1, "x"]]},
        "terms": {"hang": [1, 2], "rank": 2},
        "titleterms": {"hang": [0, 1], "rank": 0, "ranking": 1},
        "indexentries": {"ranks": [[1, "index-0", True]], "hang": [[2, "x", False]]},
    }
    assert site_search.found(index, "hangs") == ["a", "b", "c"]
    assert site_search.found(index, "the rank hangs") == ["a", "c"]
    assert site_search.found(index, "rankin") == ["b"]
    assert site_search.found(index, "ranks") == ["b", "a", "c"]
    assert site_search.found(index, "nothing") == site_search.found(index, "the") == []


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (source / "index.md").write_text("# A\n\n[](b.md)\n")
    done = build(source, tmp_path / "built")
    assert done.returncode != 0
    assert "b.md" in done.output


def test_each_picture_is_drawn_by_the_script_and_shown(tmp_path):
    command = [sys.executable, str(guide.FOLDER / "pictures" / "draw.py"), str(tmp_path)]
    done = spmd.execute(command, env=spmd.EVERY_PACKAGE, timeout=120)
    assert done.returncode == 0, done.output
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (guide.FOLDER / "pictures").glob("*.svg")}
    assert all(f"pictures/{name}" in TEXT for name in drawn)


def commands(text):
    """Returns the arguments of each line of a shell fence that starts with `kdist`."""
    lines = [line for _, code in guide.fences(text, "sh", "bash") for line in code.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kdist ")]


def test_the_commands_are_understood():
    found = commands(TEXT)
    assert {words[0] for words in found} == {"run", "plan", "check", "env", "install-horovod"}
    for words in found:
        make_parser().parse_args(words)


def test_a_command_that_is_not_understood_is_seen():
    ((*words,),) = commands("```sh\nkdist install-horovod --no-such-option 2  # a remark\n```\n")
    assert words == ["install-horovod", "--no-such-option", "2"]
    with pytest.raises(SystemExit):
        make_parser().parse_args(words)


def sections(text):
    """Returns the text of each section that a page has on a command, by its name."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    found = zip(parts[1::2], parts[2::2], strict=True)
    return {title.strip("`").removeprefix("kdist "): body for title, body in found if "`kdist " in title}


def differences(text):
    """Returns where a page on the commands and `--help` differ: in the options of one, or in a default number."""
    (subcommands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found = [f"kdist {subcommand}" for subcommand in set(subcommands.choices) ^ set(sections(text))]
    for subcommand, body in sections(text).items():
        rows = [line for line in body.splitlines() if line.startswith("| `-")]
        options = [
            each for each in subcommands.choices[subcommand]._actions if each.option_strings and each.dest != "help"
        ]
        known = {name for each in options for name in each.option_strings}
        listed = {name for row in rows for name in re.findall(r"`(--?\w[\w-]*)", row.split(" | ")[0])}
        found += [f"kdist {subcommand} {name}" for name in listed - known]
        for each in options:
            lines = [row for row in rows if any(f"`{name}" in row.split(" | ")[0] for name in each.option_strings)]
            if not any(f"`{name}" in body for name in each.option_strings):
                found.append(f"kdist {subcommand} {each.option_strings[0]}")
            for number in re.findall(r"\((\d+)\)$", each.help or "") if lines else ():
                found += [f"kdist {subcommand} {each.option_strings[0]} ({number})"] * (number not in " ".join(lines))
    return found


COMMANDS = guide.PAGES["command_line"].read_text()


def test_the_page_on_the_commands_says_what_help_says():
    assert differences(COMMANDS) == []


def test_a_difference_from_help_is_seen():
    assert differences(COMMANDS.replace("`--look SECONDS`", "`--glance SECONDS`")) == [
        "kdist run --glance",
        "kdist run --look",
    ]
    assert differences(COMMANDS.replace("1800 by default", "900 by default")) == ["kdist plan --timeout (1800)"]
    assert differences(COMMANDS.replace("## `kdist env`", "## env")) == ["kdist env"]


def names():
    """Returns all that a user can write: public names, arguments, options and environment variables."""
    yield from (f"kdist.{name}" for name in kdist.__all__)
    yield from (f"kdist.callbacks.{name}" for name in kdist.callbacks.__all__)
    yield from (name for name, value in vars(kdist.errors).items() if inspect.isclass(value))
    arguments = list(inspect.signature(kdist.scope).parameters)
    yield from arguments
    yield from (f"KDIST_{name.upper()}" for name in arguments)
    for options in (AllReduce, ParameterServer, TPU):
        yield from inspect.signature(options).parameters
    (subcommands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for subcommand, parser in subcommands.choices.items():
        yield f"kdist {subcommand}"
        yield from (
            f"`{option}" for each in parser._actions for option in each.option_strings if option not in ("-h", "--help")
        )


def unnamed(text):
    """Returns the names that a text lacks, as whole words."""
    return [name for name in names() if not re.search(rf"{re.escape(name)}(?![\w-])", text)]


def test_everything_public_is_in_the_guide():
    documented = TEXT + "".join(inspect.getdoc(each) or "" for each in (AllReduce, ParameterServer, TPU))
    # What `automodule` writes into the reference.
    documented += kdist.errors.__doc__
    assert unnamed(documented) == []


def test_what_is_not_in_the_guide_is_seen():
    assert "kdist.scope" in unnamed(TEXT.replace("kdist.scope", "kdist.scopes"))
    assert "`--output" in unnamed(TEXT.replace("`--output", "`--out"))


def test_a_page_is_reached_from_the_first_one():
    listed = set(re.findall(r"^(\w+)$", guide.PAGES["index"].read_text(), re.MULTILINE))
    assert set(guide.PAGES) - {"index"} <= listed


def test_the_shell_can_read_every_line():
    for _, code in guide.fences(TEXT, "sh", "bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True, timeout=10)
