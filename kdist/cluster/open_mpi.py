"""What Open MPI reads when it starts, and what kdist sets for that long."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_TRANSPORTS = "OMPI_MCA_btl"
_UNUSED = "ofi"
_IN_A_FILE = re.compile(r"^\s*btl\s*=\s*(\S+)", re.MULTILINE)


def without_unused_transport() -> contextlib.AbstractContextManager[None]:
    """A context in which `MPI_Init` leaves out Open MPI's one-sided messages over libfabric, `btl/ofi`.

    kdist has none: two-sided messages over libfabric go through `mtl/ofi`. Where no network has use for it,
    `btl/ofi` sleeps for a second in each `MPI_Init`. A list of transports that the user has chosen stays as it is.
    """
    chosen = os.environ.get(_TRANSPORTS) or chosen_in(_parameter_files())
    chooses_files = any(name.startswith("OMPI_MCA_") and name.endswith("param_files") for name in os.environ)
    if chooses_files or (chosen is not None and not chosen.startswith("^")):
        return contextlib.nullcontext()
    left_out = chosen[1:].split(",") if chosen else []
    return _set({_TRANSPORTS: "^" + ",".join(dict.fromkeys([*left_out, _UNUSED]))})


def with_defaults(defaults: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """A context in which the environment has the defaults of variables that are not set.

    Args:
        defaults: mapping of variables to values.
    """
    return _set({name: value for name, value in defaults.items() if name not in os.environ})


def chosen_in(files: Iterable[Path]) -> str | None:
    """Returns the transports that the first of Open MPI's parameter files chooses which chooses any.

    Args:
        files: paths, those that do not exist included.
    """
    for file in files:
        with contextlib.suppress(OSError):
            if found := _IN_A_FILE.findall(file.read_text(errors="replace")):
                return str(found[-1])
    return None


def _parameter_files() -> Iterator[Path]:
    """Returns where the loaded Open MPI looks for parameters, the user's own file first."""
    with contextlib.suppress(RuntimeError):  # no home directory
        yield Path.home() / ".openmpi" / "mca-params.conf"
    prefixes = [Path(os.environ["OPAL_PREFIX"])] if "OPAL_PREFIX" in os.environ else []
    with contextlib.suppress(OSError):  # Linux only
        for path in dict.fromkeys(re.findall(r"/\S*/libmpi\.so\S*", Path("/proc/self/maps").read_text())):
            prefixes.append(Path(path).parents[1])
    yield from (prefix / "etc" / "openmpi-mca-params.conf" for prefix in prefixes)
    yield from sorted(Path("/etc").glob("openmpi*/openmpi-mca-params.conf"))


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
