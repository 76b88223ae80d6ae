"""The `kdist` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from kdist.cli import check, env, install_horovod, run
from kdist.errors import KDistError

_VERBS = (run, env, check, install_horovod)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `kdist` command.

    Args:
        argv: sequence of str, the arguments; by default those of the process.

    Returns:
        The exit code: that of the script, or 2 if it could not be started.
    """
    options = make_parser().parse_args(argv)
    logging.basicConfig(format="kdist: %(message)s")
    try:
        return options.verb(options)
    except KDistError as error:
        print(f"kdist: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments, with those of each verb."""
    parser = argparse.ArgumentParser(
        prog="kdist", description="Train an unchanged Keras script on several processes exactly as on one."
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
