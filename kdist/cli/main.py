"""The `kdist` command."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from kdist import __version__
from kdist.cli.jobs.parser import Parser
from kdist.errors import KDistError
from kdist.reports.failure import uninstall_early_hook

_SUBCOMMANDS = ("run", "plan", "env", "check", "install-horovod")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `kdist` command.

    Args:
        argv: sequence of str, the arguments; by default those of the process.

    Returns:
        The exit code: that of the script, or 2 if it could not be started.
    """
    words = sys.argv[1:] if argv is None else argv
    uninstall_early_hook()  # `srun kdist run` is one of several processes, too
    # The modules of the other subcommands need not be imported: a job starts sooner.
    parser = make_parser([word for word in words[:1] if word in _SUBCOMMANDS] or _SUBCOMMANDS)
    options = parser.parse_args(words)
    if options.subcommand is None:
        parser.print_help()
        return 0
    logging.basicConfig(format="kdist: %(message)s")
    try:
        return options.subcommand(options)
    except KDistError as error:
        print(f"kdist: {error}", file=sys.stderr)
        return 2


def make_parser(names: Sequence[str] = _SUBCOMMANDS) -> Parser:
    """Returns the parser of the command's arguments, with those of some subcommands.

    Args:
        names: sequence of str, the subcommands; by default all.
    """
    parser = Parser(
        prog="kdist",
        description="Train a Keras script on several processes. By default batch and learning rate grow with them; "
        "with scale_batch=False the result is that of one process, to rounding.",
        epilog="Begin with: kdist run -np 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"kdist {__version__}")
    parser.set_defaults(subcommand=None)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in names:
        importlib.import_module(f"kdist.cli.{name.replace('-', '_')}").add_parser(subcommands)
    for each in subcommands.choices.values():
        each.set_defaults(parser=each)
    return parser


if __name__ == "__main__":
    sys.exit(main())
