"""`kdist.launch`: calls a function on several processes, from a notebook or a script."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TextIO, TypeVar

from kdist._suggestions import with_suggestions
from kdist.errors import EngineError, LaunchError
from kdist.launchers.functions import rank_program
from kdist.launchers.process import guard
from kdist.launchers.start import module_command
from kdist.reports.output import SAID

T = TypeVar("T")

_READ_BYTES = 1 << 16


class RankError(Exception):
    """The traceback of a rank, as the cause of the exception that `kdist.launch` raises."""


@with_suggestions
def launch(
    function: Callable[..., T],
    np: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    strategy: Literal["auto", "single", "mpi", "horovod", "collective", "parameter_server"] | None = None,
    hosts: str | None = None,
    output: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> T:
    """Calls a function on several fresh processes, as `kdist run` starts them, and returns what it returned.

    Made for notebooks, where there is no script to start. The function enters `kdist.scope()` itself. It is sent by
    cloudpickle, with what it uses of the notebook: other functions, data, modules that were imported. The output of
    rank 0 appears as it is written. An interrupt ends the job.

    It blocks until the job has ended. Only rank 0 returns a value; those of the other ranks are lost. All ranks must
    call the collectives in the function in the same order; this process is none of them.

    Args:
        function: a function; each rank calls it once.
        np: int, the number of ranks.
        args: sequence, its positional arguments.
        kwargs: mapping or `None`, its keyword arguments.
        strategy: as `kdist run --strategy`, or `None`.
        hosts: str or `None`, as `kdist run -H`: `"a:2,b:2"`. On other hosts the temporary directory of this one must
            exist, as on a shared disk: set `TMPDIR`.
        output: path or `None`, a directory for the output of every rank, as `kdist run --output`.
        env: mapping or `None`, variables that are added to the environment of the ranks.

    Returns:
        What the function returned on rank 0, sent back by pickle.

    Raises:
        LaunchError: if the job cannot be started, or ends without a result.
        Exception: what the function raised first on any rank, with that rank's traceback as its cause. Where that
            follows from another rank's end, the cause says so: which rank, and what ended it.

    Example:
    ```python
    def train(epochs):
        with kdist.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model.fit(x, y, epochs=epochs).history

    history = kdist.launch(train, np=2, kwargs={"epochs": 3})
    ```
    """
    if not callable(function):
        raise LaunchError(
            f"`function` is not callable. Received: {function!r}. Expected a function. Fix: kdist.launch(train, "
            "np=2), without parentheses after the function; for a file, `kdist run -np 2 train.py`."
        )
    if not isinstance(np, int) or np < 1:
        raise LaunchError(f"`np` is no number of ranks. Received: np={np!r}. Expected an int of at least 1. Fix: np=2.")
    with tempfile.TemporaryDirectory(prefix="kdist-launch-") as name:
        directory = Path(name)
        (directory / rank_program.CALL).write_bytes(_pickled_call(function, args, dict(kwargs or {})))
        options = ["-np", str(np)]
        options += [] if strategy is None else ["--strategy", strategy]
        options += [] if hosts is None else ["-H", hosts]
        options += [] if output is None else ["--output", str(output)]
        command = [*module_command(sys.executable, "kdist.cli.main"), "run", *options]
        command += ["-m", rank_program.__name__, name]
        code, held = _run(command, {**os.environ, **(env or {})}, failed=lambda: any(_errors(directory)))
        if errors := _errors(directory):
            _raise(errors[0], np, held)
        result = directory / rank_program.RESULT
        if code or not result.exists():
            raise LaunchError(
                f"The job ended without a result. Received: exit code {code} of `kdist run {' '.join(options)}`. "
                "Expected the function to return on all ranks. Fix: see the messages above."
            )
        import cloudpickle

        value: T = cloudpickle.loads(result.read_bytes())
        return value


def _pickled_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    import cloudpickle

    try:
        call = cloudpickle.dumps((function, tuple(args), kwargs))
        return bytes(cloudpickle.dumps((sys.path, call)))  # the ranks need the path to import what the call names
    except Exception as error:
        raise LaunchError(
            f"The function cannot be sent to the ranks. Received: {function!r} ({type(error).__name__}: {error}). "
            "Expected a function whose arguments and variables pickle can write. Fix: make models, datasets, files and "
            "locks inside of the function."
        ) from error


def _run(command: Sequence[str], env: Mapping[str, str], failed: Callable[[], bool]) -> tuple[int, str]:
    """Runs a command, copies its output to `sys.stdout` and `sys.stderr`, which a notebook shows, and returns its code.

    Its standard error is held back from the moment that a rank has failed, and returned: the caller gets the exception.
    """
    held: list[str] = []

    def shown(text: str) -> bool:
        if is_held := failed():
            held.append(text)
        return not is_held

    with (
        guard() as guard_session,
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process,
    ):
        guard_session(process.pid)  # a kernel that is killed ends its job
        readers = [
            threading.Thread(target=_copy, args=(process.stdout, sys.stdout, lambda text: True), daemon=True),
            threading.Thread(target=_copy, args=(process.stderr, sys.stderr, shown), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)  # `kdist run` ends its ranks
            process.wait()
            raise
        finally:
            for reader in readers:
                reader.join(timeout=5.0)
    return code, "".join(held)


def _copy(source: IO[bytes], target: TextIO, shown: Callable[[str], bool]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := os.read(source.fileno(), _READ_BYTES):
        if shown(text := decoder.decode(piece)):
            with contextlib.suppress(Exception):  # of a target that is closed, or the user's: ranks must not wait
                _write(target, text)


def _write(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeEncodeError:
        target.write(text.encode("ascii", "backslashreplace").decode())
    target.flush()


def _errors(directory: Path) -> list[Path]:
    """Returns the files of ranks that raised, the first one first."""
    return sorted(directory.glob(rank_program.ERROR.format("*")), key=lambda path: path.stat().st_mtime_ns)


def _raise(path: Path, size: int, held: str) -> NoReturn:
    import cloudpickle

    text, pickled = cloudpickle.loads(path.read_bytes())
    rank = path.stem.removeprefix(rank_program.ERROR.partition("{")[0])
    error = None if pickled is None else cloudpickle.loads(pickled)
    # A rank that was killed raises nothing, and makes others raise.
    told = [line for line in held.splitlines() if line.startswith(SAID)]
    if told and told[0].startswith(f"{SAID}rank {rank} ") and not isinstance(error, EngineError):
        told = []
    cause = RankError("\n".join([f"rank {rank} of {size} raised:\n\n{text}", *told]))
    if error is None:
        raise LaunchError(f"The function failed on rank {rank} of {size}. {text.splitlines()[-1]}") from cause
    raise error from cause
