"""The parser of the command line: each error shows the usage of the command that was meant, and what is similar."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that names the similar option where one is unknown."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses arguments; an unknown one is an error of the command that got it, as `kdist run`."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(options, "parser", self).refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exits with a message on unknown arguments.

        Args:
            unknown: sequence of str, the arguments.
        """
        known = [option for action in self._actions for option in action.option_strings]
        similar = [meant for each in unknown if (meant := closest(each, known))]
        hint = f"; did you mean {', '.join(similar)}?" if similar else ""
        self.error(f"unknown: {' '.join(unknown)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            meant = closest(str(value), map(str, action.choices))
            hint = f"did you mean {meant}?" if meant else f"choose one of {', '.join(map(str, action.choices))}"
            raise argparse.ArgumentError(action, f"unknown: {value}; {hint}")


def count(text: str) -> int:
    """Returns a whole number, for `type=` of an argument.

    Args:
        text: str, what was written.

    Raises:
        argparse.ArgumentTypeError: if it is no whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"received {text!r}, expected a whole number. Fix: write digits, as 2"
        ) from None


def positive_seconds(text: str) -> float:
    """Returns a time above 0 that ends, for `type=` of an argument; takes and raises the same as `seconds`."""
    value = seconds(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"received {text!r}, expected seconds, above 0. Fix: write a number, as 60")
    return value


def seconds(text: str) -> float:
    """Returns a time, for `type=` of an argument.

    Args:
        text: str, what was written.

    Raises:
        argparse.ArgumentTypeError: if it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"received {text!r}, expected seconds. Fix: write a number, as 60") from None


def closest(word: str, known: Iterable[str]) -> str:
    """Returns the known word that a word resembles, or an empty text.

    Args:
        word: str, what was written.
        known: iterable of str.
    """
    return next(iter(difflib.get_close_matches(word.partition("=")[0], list(known), n=1, cutoff=0.6)), "")
