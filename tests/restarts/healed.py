"""A training whose ranks are killed, and go on in their processes: `python -m tests.restarts.healed FOLDER WAY...`.

Each way breaks one run of the script, as for `tests.restarts.training`; of several with `,` between them all do at
once. `start@R` kills rank R before the scope, when the others open it without one that was lost. `BACKUP_SETTINGS` has
arguments of the backup. The last run trains a second time as well, without an interruption: the chief keeps what came
of both. Each run leaves its ranks' process ids.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import keras

import kdist
from kdist.restarts.events import own_reports
from tests.restarts import here
from tests.restarts.resized import keep, train
from tests.restarts.training import Broken

OWN_RUNS = "RUNS_OF_THIS_PROCESS"  # an environment variable: what a script sets there stays


def main() -> None:
    """Trains to the end, if nothing comes between."""
    folder, *ways = sys.argv[1:]
    keras.backend.set_floatx("float64")
    assert not hasattr(here, "was_imported"), "the run of before has left its modules"
    here.was_imported = True
    assert own_reports.is_resized, "a global batch that changes would not be warned of"
    runs, own = Path(folder, "runs"), int(os.environ.get(OWN_RUNS, "0"))
    os.environ[OWN_RUNS] = str(own + 1)
    if own < len(ways) and ways[own] == f"start@{kdist.rank()}" and not Path(folder, "killed").exists():
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kdist.is_chief():
        with runs.open("a") as file:
            file.write(".")
    kdist.barrier()
    number = len(runs.read_text()) - 1
    Path(folder, f"run{number}.rank{kdist.rank()}").write_text(str(os.getpid()))
    now = ways[number].split(",") if number < len(ways) else []
    broken = [Broken(each) for each in now if not each.startswith("start")]
    settings = json.loads(os.environ.get("BACKUP_SETTINGS", '{"save_freq": 2}'))
    print(f"run {number} of {kdist.size()} ranks")
    result = train("arrays", Path(folder, "backup"), [*broken, kdist.callbacks.Preemption()], settings)
    keep(Path(folder, "arrays-resized.npz"), result)
    keep(Path(folder, "arrays-whole.npz"), train("arrays", Path(folder, "unused"), []))


if __name__ == "__main__":
    main()
