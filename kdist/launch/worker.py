"""What each rank runs, `python -m kdist.launch.worker`: the user's script, and the end of the job if it fails."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib.machinery
import os
import runpy
import socket
import stat
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from kdist.cluster import detect
from kdist.launch import failure, witness
from kdist.launch.output import redirect


def program(
    python: str,
    command: Sequence[str],
    *,
    module: bool = False,
    output: str | None = None,
    running: str | None = None,
) -> tuple[str, ...]:
    """Returns the arguments that start a worker.

    Args:
        python: str, the Python that runs it.
        command: sequence of str, the script (or module) and its arguments.
        module: bool, whether `command` begins with a module.
        output: str or `None`, the directory that keeps every rank's output.
        running: str or `None`, a directory of this host in which its ranks have a file each, until their script has
            ended well.

    Returns:
        A tuple of str.
    """
    kept = () if output is None else ("--output", output)
    noted = () if running is None else ("--running", running)
    return (python, "-m", "kdist.launch.worker", *kept, *noted, *(("-m",) if module else ()), *command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a script or a module as `__main__`, as Python itself would.

    Args:
        argv: sequence of str, the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(argv)
    is_module, command = options.module is not None, options.module or options.command
    if not command:
        _parser().error("a script or -m MODULE is required")
    info = detect(os.environ)
    said = None
    if options.running and info.local_size == info.size > 1 and witness.is_needed(os.environ):
        introduction = witness.Introduction(options.running, info.rank, info.size, os.environ)
        said = introduction.has_said_why
        atexit.register(introduction.ends_well)  # first, to be called last
    redirect(info.rank, options.output)
    note = None if options.running is None else Path(options.running, str(info.rank))
    if note is not None:
        with contextlib.suppress(OSError):
            note.touch()
    hook = failure.install(end_job, info.rank, info.size, before_end=said) if info.size > 1 else None
    try:
        _run(command, is_module)
    except BaseException as error:
        code, trace = failure.exit_code(error), _own_frames_removed(error.__traceback__)
        if code == 0:
            _remove(note)
        error.__traceback__ = trace
        if isinstance(error, SystemExit) and (hook is None or code == 0):
            raise
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            # Whatever the script made of it comes first; if that is still the hook below, it does not return.
            sys.excepthook(type(error), error, trace)
            if hook is not None:
                hook.end(code)
        elif hook is not None:
            hook(type(error), error, trace)
        return code
    _remove(note)
    return 0


def end_job(code: int) -> NoReturn:
    """Ends this process such that the launcher ends the others, whether or not MPI was initialised.

    Open MPI ends a job when a process of it ends with a code. Hydra (MPICH, Intel MPI) does so only for a
    process that was in MPI, so it is told, by one line of the protocol that it speaks with its processes.

    Args:
        code: int, the exit code, from 1 to 255.
    """
    with contextlib.suppress(OSError, ValueError, OverflowError):
        descriptor = int(os.environ.get("PMI_FD", ""))
        # MPI closes it when it is finalised; the number may be another file's then.
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as launcher:
                if launcher.family == socket.AF_UNIX:
                    launcher.sendall(witness.abort_line(code))
    os._exit(code)


def _remove(note: Path | None) -> None:
    if note is not None:
        note.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist.launch.worker", allow_abbrev=False)
    parser.add_argument("--output", metavar="DIR")
    parser.add_argument("--running", metavar="DIR")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _run(command: Sequence[str], is_module: bool) -> None:
    sys.argv = list(command)
    if is_module:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(command[0])
    if os.path.isdir(script) or zipfile.is_zipfile(script) or script.endswith(".pyc"):
        runpy.run_path(command[0], run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    # Not `runpy.run_path`: there `__file__` may be relative, and `__main__` is another module after the script's end.
    main_module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    vars(main_module).update(__file__=script, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main_module
    exec(compile(loader.get_data(script), script, "exec", dont_inherit=True), vars(main_module))


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main())
