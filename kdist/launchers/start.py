"""Starts a module of kdist, `python .../start.py MODULE ARGS...`, without the working directory on the path.

`python -m` would put that directory first, and a file there that is called `secrets.py` or `platform.py` would take the
place of the standard library's in the launcher and on each rank.
"""

from __future__ import annotations

import sys


def module_command(python: str, module: str) -> tuple[str, str, str]:
    """Returns the words that start the `main` of a module; its arguments follow.

    Args:
        python: str, the Python that runs it.
        module: str, its dotted name.
    """
    return python, __file__, module


def _main() -> int | None:
    import importlib.util
    import os

    # The kdist that this file is of: there may be another one, or none that the path leads to, as in a checkout.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("kdist", os.path.join(package, "__init__.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is no package")
    sys.modules["kdist"] = kdist = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kdist)
    code: int | None = importlib.import_module(sys.argv.pop(1)).main()
    return code


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the directory of this file
    sys.exit(_main())
