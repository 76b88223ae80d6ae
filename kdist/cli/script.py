"""What the ranks run, from the words that follow the options: `train.py`, `-- train.py`, `python train.py`, `-m x`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from kdist.errors import LaunchError

_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_RUN_IN_A_DIRECTORY = ("__main__.py", "__main__.pyc")
_UNBUFFERED = "-u"  # ranks are line-buffered


def add_arguments(parser: argparse.ArgumentParser, subcommand: str) -> None:
    """Adds `-m` and the script to a subcommand's parser.

    Args:
        parser: `ArgumentParser`.
        subcommand: str, its name, which is what it does with the script.
    """
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help=f"{subcommand} a module, as `python -m` does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def required(options: argparse.Namespace, subcommand: str) -> tuple[list[str], bool]:
    """Returns the script, or module, with its arguments, and whether it is a module, where one must be given.

    Args:
        options: the parsed arguments.
        subcommand: str, as for `add_arguments`.

    Raises:
        LaunchError: if there is none, or for a reason of `parse`.
    """
    words, is_module = parse(options.script, options.module)
    if not words:
        raise LaunchError(
            f"No script given. Received: neither a script nor -m MODULE. Expected one. Fix: "
            f"kdist {subcommand} -np 2 train.py"
        )
    if not is_module:
        check_exists(words[0], f"; `kdist {subcommand} -m` takes a module")
    return words, is_module


def parse(words: Sequence[str], module: Sequence[str] | None = None) -> tuple[list[str], bool]:
    """Returns the script, or module, with its arguments, and whether it is a module.

    Args:
        words: sequence of str, what follows the options of kdist.
        module: sequence of str or `None`, what follows `-m`.

    Raises:
        LaunchError: if the script does not exist, or another Python or its options are asked for.
    """
    if module:
        return list(module), True
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if rest and _is_python(rest[0]):
        rest = rest[1:]
    while rest[:1] == [_UNBUFFERED]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return rest[1:], True
    if rest[:1] == ["-c"]:
        raise LaunchError(
            "The ranks run a file or a module. Received: -c and code. Expected a script or -m MODULE. Fix: write the "
            "code to a file, and give its name."
        )
    if rest and rest[0].startswith("-"):
        raise LaunchError(
            f"The ranks take no options of Python. Received: {rest[0]}. Expected a script or -m MODULE. Fix: omit it, "
            "or set its variable (PYTHONWARNINGS, PYTHONOPTIMIZE, ...)."
        )
    return rest, False


def _is_python(word: str) -> bool:
    """Returns whether a word is this Python, and not a script of that name; raises if it is another Python."""
    if not _PYTHON.fullmatch(os.path.basename(word)):
        return False
    if os.sep not in word:
        return not os.path.exists(word)  # a name on PATH, and no file here
    if not os.path.isabs(word) and not (os.path.isfile(word) and os.access(word, os.X_OK)):
        return False
    with contextlib.suppress(OSError):
        if os.path.samefile(os.path.dirname(word), os.path.dirname(sys.executable)):
            return True
    raise LaunchError(
        f"The ranks run in the environment of kdist. Received: {word}. Expected {sys.executable}, or none. Fix: omit "
        f"it; for another Python, `{word} -m kdist run ...`."
    )


def check_exists(script: str, otherwise: str = "") -> None:
    """Raises if a script does not exist, or is a directory that cannot be run, once instead of on each rank.

    Args:
        script: str, its path.
        otherwise: str, what else the command takes, for the message.

    Raises:
        LaunchError: if there is nothing to run.
    """
    if not os.path.exists(script):
        raise LaunchError(
            f"The script does not exist. Received: {script!r} in {os.getcwd()}. Expected an existing file; options of "
            f"kdist go before it, those of the script after it. Fix: check the path{otherwise}."
        )
    if os.path.isdir(script) and not any(os.path.exists(os.path.join(script, each)) for each in _RUN_IN_A_DIRECTORY):
        raise LaunchError(
            f"The script is a directory. Received: {script!r}, which has no __main__.py. Expected a file. Fix: "
            f"{os.path.join(script, 'train.py')}, or the name of your script."
        )


def file_of(module: str) -> str:
    """Returns the file that `-m` runs, or an empty text; nothing is imported.

    Args:
        module: str, its dotted name.
    """
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = None
    for part in module.split("."):
        found = None if places is None else PathFinder.find_spec(part, places)
        places = None if found is None else found.submodule_search_locations
    if places is not None:
        found = PathFinder.find_spec("__main__", places)
    return "" if found is None else found.origin or ""
