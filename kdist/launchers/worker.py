"""The program of each rank: it runs the script, and ends the job if that fails."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import functools
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
from kdist.cluster.info import ClusterInfo
from kdist.healing.survivor import Survivor
from kdist.launchers import huge_pages
from kdist.launchers.standby import wait
from kdist.launchers.start import module_command
from kdist.reports import breakpoint_hook, failure, first_failure
from kdist.reports.output import Shown, redirect
from kdist.reports.scope_marks import own_scopes
from kdist.restarts import request
from kdist.restarts.events import own_reports

_STARTS_WITHIN = 10.0  # seconds, to the first steps of a small model


def program(
    python: str,
    command: Sequence[str],
    *,
    module: bool = False,
    output: str | None = None,
    running: str | None = None,
    tee: bool = False,
    supervised: str = "",
    standby: str = "",
    resizes: bool = False,
    heals: int | None = None,
    stdin: str | None = None,
) -> tuple[str, ...]:
    """Returns the arguments that start a worker.

    Args:
        python: str, the Python that runs it.
        command: sequence of str, the script (or module) and its arguments.
        module: bool, whether `command` begins with a module.
        output: str or `None`, the directory of every rank's output.
        running: str or `None`, a directory of this host in which each rank has a file until its script has
            finished without an error.
        tee: bool, whether the output of all ranks is shown, with rank and time.
        supervised: str, what distinguishes a job that is started again from others; its ranks report how they fare.
        standby: str, where each rank waits to be told to begin; by default it begins at once.
        resizes: bool, whether the supervisor may change the number of ranks.
        heals: int or `None`, the fewest ranks that run the script again when another one was killed.
        stdin: str or `None`, the file that rank 0 opens as its standard input, if that is not the launcher's.

    Returns:
        A tuple of str.
    """
    options: tuple[str, ...] = () if output is None else ("--output", output)
    options += ("--tee",) if tee else ()
    options += () if running is None else ("--running", running)
    options += ("--supervised", supervised) if supervised else ()
    options += ("--standby", standby) if standby else ()
    options += ("--resizes",) if resizes else ()
    options += () if heals is None else ("--heals", str(heals))
    options += () if stdin is None else ("--stdin", stdin)
    # mpirun would take what follows a word that is a colon for another program.
    places = [place for place, word in enumerate(command) if word == ":"]
    options += ("--colons", ",".join(map(str, places))) if places else ()
    words = ["colon" if word == ":" else word for word in command]
    return (*module_command(python, __name__), *options, *(("-m",) if module else ()), *words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a script or a module as `__main__`, as Python itself would.

    Args:
        argv: sequence of str, the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(argv)
    is_module, command = options.module is not None, options.module or options.command
    for place in filter(None, options.colons.split(",")):
        command[int(place)] = ":"
    if not command:
        _parser().error("a script or -m MODULE is required")
    if options.standby:
        wait(options.standby)
    huge_pages.allow_later(os.environ, _STARTS_WITHIN)
    info = detect(os.environ)
    if options.stdin and info.rank == 0:
        _read_input_from(options.stdin)
    report_failure = None
    if options.running and info.local_size == info.size > 1 and first_failure.is_needed(os.environ):
        registration = first_failure.Registration(options.running, info.rank, info.size, os.environ)
        report_failure = registration.report_failure
        atexit.register(registration.report_success)  # registered first, called last
    shown = None if options.heals is None or options.tee else Shown()
    redirect(info.rank, options.output, tee=options.tee)
    breakpoint_hook.install(info, os.environ)
    running_file = _register(options, info)
    hook = failure.install(end_job, info.rank, info.size, before_abort=report_failure) if info.size > 1 else None
    survivor = None
    if options.heals is not None and hook is not None:
        become_chief = _nothing if shown is None else functools.partial(shown.show, info.rank, options.output)
        survivor = Survivor(options.heals, hook, become_chief)
    try:
        _run_to_the_end(command, is_module, survivor)
    except BaseException as error:
        code, trace = failure.exit_code(error), _without_own_frames(error.__traceback__)
        if code == 0:
            _ended_well(running_file)
        error.__traceback__ = trace
        if hook is None:
            failure.report(error)
        if isinstance(error, SystemExit) and (hook is None or code == 0):
            raise
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            # The script may have set a hook of its own. The hook below does not return.
            sys.excepthook(type(error), error, trace)
            if hook is not None:
                hook.end(code)
        elif hook is not None:
            hook(type(error), error, trace)
        return code
    _ended_well(running_file)
    return 0


def end_job(code: int) -> NoReturn:
    """Exits this process so that the launcher ends the others, whether or not MPI was initialised.

    Open MPI ends a job when one of its processes exits with a non-zero code. Hydra (MPICH, Intel MPI) does so only for
    a process that had initialised MPI; it is sent the abort command of its PMI protocol.

    Args:
        code: int, the exit code, from 1 to 255.
    """
    with contextlib.suppress(OSError, ValueError, OverflowError):
        descriptor = int(os.environ.get("PMI_FD", ""))
        # MPI_Finalize closes it; the descriptor may be another file then.
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as launcher:
                if launcher.family == socket.AF_UNIX:
                    launcher.sendall(first_failure.abort_command(code))
    os._exit(code)


def _register(options: argparse.Namespace, info: ClusterInfo) -> Path | None:
    """Registers this rank in the directory of the job, and returns its file there; `None` without a directory."""
    if options.running is None:
        return None
    directory = Path(options.running)
    own_reports.running, own_reports.rank = directory, info.rank
    if options.supervised:
        own_reports.directory, own_reports.job = directory, options.supervised
        own_reports.is_resized = options.resizes
    file = directory / str(info.rank)
    with contextlib.suppress(OSError):
        file.write_text(str(os.getpid()))  # of a rank of Open MPI's ULFM nobody else says that it is gone
    if info.size > 1:
        own_scopes.begins(directory, info.rank)
    return file


def _ended_well(file: Path | None) -> None:
    own_scopes.script_ended(used_keras="keras" in sys.modules)
    own_reports.script_ended()
    if file is not None:
        file.unlink(missing_ok=True)
        if own_reports.rank == 0:
            request.remove(file.parent)  # `kdist run` may be on another host


def _read_input_from(path: str) -> None:
    with contextlib.suppress(OSError):  # `kdist run` has ended
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe whose writer has ended would block
        os.set_blocking(file, True)
        os.dup2(file, 0)
        os.close(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdist.launchers.worker", allow_abbrev=False)
    parser.add_argument("--output", metavar="DIR")
    parser.add_argument("--running", metavar="DIR")
    parser.add_argument("--tee", action="store_true")
    parser.add_argument("--supervised", metavar="JOB")
    parser.add_argument("--standby", metavar="HOST,...:PORT:TOKEN")
    parser.add_argument("--resizes", action="store_true")
    parser.add_argument("--heals", type=int, metavar="N")
    parser.add_argument("--stdin", metavar="FILE")
    parser.add_argument("--colons", metavar="PLACE,...", default="")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _run_to_the_end(command: Sequence[str], is_module: bool, survivor: Survivor | None) -> None:
    """Runs the script; again where another rank was killed, and those that are left go on."""
    while True:
        try:
            _run(command, is_module)
        except BaseException as error:
            if survivor is None or not survivor.goes_on_after(error):
                raise
        else:
            if survivor is None or not survivor.goes_on_after(None):
                return
        survivor.heal()


def _nothing() -> None:
    pass


def _run(command: Sequence[str], is_module: bool) -> None:
    sys.argv = list(command)
    script = os.path.abspath(command[0])
    is_folder = not is_module and (os.path.isdir(script) or zipfile.is_zipfile(script))
    if not (is_folder or getattr(sys.flags, "safe_path", False)):  # `runpy` puts a folder there itself
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
    if is_module:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    if is_folder or script.endswith(".pyc"):
        runpy.run_path(command[0], run_name="__main__")
        return
    # Not `runpy.run_path`: its `__file__` may be relative, and it restores `__main__` when the script has finished.
    main_module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    vars(main_module).update(__file__=script, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main_module
    exec(compile(loader.get_data(script), script, "exec", dont_inherit=True), vars(main_module))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace
