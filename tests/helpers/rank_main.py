"""What each rank of `spmd.run` executes: `python -m tests.helpers.rank_main DIRECTORY`."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

BEFORE_CASES = "(before the cases)"  # reported in a case's place when importing or making what is given fails

GRACE = 3.0  # seconds in which the others may report the failed case too


def cases_of(target: str) -> Mapping[str, Callable[..., Any]]:
    """Returns a target's cases by name: of `module`, `module:function` or `module:mapping`, or several with commas."""
    if "," in target:
        found: dict[str, Callable[..., Any]] = {}
        for cases in map(cases_of, target.split(",")):
            assert not found.keys() & cases.keys(), f"two cases have one name: {found.keys() & cases.keys()}"
            found |= cases
        return found
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    if not attribute:
        return {name: value for name, value in vars(module).items() if name.startswith("case_") and callable(value)}
    value = getattr(module, attribute)
    return value if isinstance(value, Mapping) else {attribute: value}


def main(directory: Path) -> None:
    """Runs the requested cases and reports each as one line of JSON."""
    request = json.loads((directory / "request.json").read_text())
    rank = _rank(os.environ[request["rank_variable"]])
    with open(directory / f"{rank}.out", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(request["stacks_after"])
    gc.set_threshold(100_000, 50, 100)  # tracing makes much that stays: to look through it again and again costs a lot
    name = BEFORE_CASES
    value: Any = None
    with open(directory / f"{rank}.jsonl", "w", buffering=1) as reports:
        try:
            given = _given(request["given"])
            cases = cases_of(request["target"])
            for name in request["cases"]:
                case = cases[name]
                print(f"[{name}]", flush=True)
                _restore_floatx()
                begun = time.process_time()
                value = case(given) if _takes_argument(case) else case()
                report = {"case": name, "error": None, "value": value, "cpu": time.process_time() - begun}
                reports.write(json.dumps(report) + "\n")
        except BaseException:
            error = traceback.format_exc()
            print(error, flush=True)
            reports.write(json.dumps({"case": name, "error": error, "value": None}) + "\n")
            _wait_for_the_others(directory, request["ranks"], name)
            _end_job()
    faulthandler.cancel_dump_traceback_later()
    if len(cases_of(request["target"])) > 1:  # a case alone may be about how a process ends
        _leave()


def _restore_floatx() -> None:
    """Lets each case begin with Keras' default precision, whatever the case before it has set."""
    keras = sys.modules.get("keras")
    if keras is not None:
        from keras.src.backend.common import global_state

        keras.config.set_floatx("float32")
        global_state.set_global_attribute("dtype_policy", None)  # Keras keeps that of the first layer


def _rank(text: str) -> int:
    """Returns the rank: the variable's number, or in a `TF_CONFIG` of workers this task's index."""
    value = json.loads(text)
    return value["task"]["index"] if isinstance(value, dict) else value


def _takes_argument(case: Callable[..., Any]) -> bool:
    return any(parameter.default is parameter.empty for parameter in inspect.signature(case).parameters.values())


def _given(target: str | None) -> Any:
    if target is None:
        return None
    (make,) = cases_of(target).values()
    return make()


def _wait_for_the_others(directory: Path, ranks: int, name: str) -> None:
    """Ends early when every rank has reported the case: a case that fails on all ranks costs no grace."""
    limit = time.monotonic() + GRACE
    sought = f'{{"case": {json.dumps(name)},'
    paths = [directory / f"{rank}.jsonl" for rank in range(ranks)]
    while time.monotonic() < limit and not all(path.exists() and sought in path.read_text() for path in paths):
        time.sleep(0.05)


def _end_job() -> None:
    """Ends the whole job: the others may be waiting for this rank in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)  # not sys.exit: nothing may wait for a peer on the way out; every launcher ends the job on this


def _leave() -> NoReturn:
    """Ends this process well, but does not take TensorFlow apart, which waits for each pipeline that was ever tuned."""
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # after Python's own exit functions mpi4py does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
