"""What each rank of `kdist.launch` runs, `python -m kdist.launchers.functions.rank_program DIR`: calls the function."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from kdist.cluster import detect
from kdist.errors import LaunchError

CALL = "call.pkl"
"""The import path, and the function and its arguments as bytes, by cloudpickle."""

RESULT = "result.pkl"
"""What the function returned on rank 0."""

ERROR = "error-rank{}.pkl"
"""The traceback, as text, and the exception that a rank raised."""


def main(directory: Path) -> None:
    """Calls the function that is written in a directory, and writes there what it returned or raised.

    Args:
        directory: path, as `kdist.launch` made it.

    Raises:
        SystemExit: with code 1, if the function raised: `kdist.launch` shows the exception in the caller.
    """
    import cloudpickle

    rank = detect(os.environ).rank
    try:
        sys.path[:], call = cloudpickle.loads((directory / CALL).read_bytes())
        function, args, kwargs = cloudpickle.loads(call)
        value = function(*args, **kwargs)
        if rank == 0:
            _write(directory / RESULT, _pickled_result(value))
    except Exception as error:
        _write(directory / ERROR.format(rank), _pickled_error(error))
        raise
    finally:
        sys.stdout.flush()


def _pickled_result(value: Any) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise LaunchError(
            f"The function's return value cannot be sent back. Received: {type(value).__name__} ({error}). Expected a "
            "value that pickle can write. Fix: return weights, `history.history` or another plain value."
        ) from error


def _pickled_error(error: Exception) -> bytes:
    import cloudpickle

    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without `main`
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)  # an exception with arguments of its own often cannot be
    except Exception:
        pickled = None
    return bytes(cloudpickle.dumps((text, pickled)))


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)  # it appears whole


if __name__ == "__main__":
    main(Path(sys.argv[1]))
