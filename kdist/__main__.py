"""`python -m kdist`: the command `kdist`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("kdist.cli.main", run_name="__main__")  # not an import: `cli` stands to the right of this room
