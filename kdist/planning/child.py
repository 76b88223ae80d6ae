"""One process of `kdist plan`: runs the script up to its first training, and writes the sizes that it finds there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kdist.errors import KDistError
from kdist.planning.activations import LEAST_ROWS, available, measure, status
from kdist.planning.first_call import FirstCall, inputs_of, run_step, stops_at_first_call
from kdist.planning.gathers import counted_gathers, traced_gathers
from kdist.planning.memory import Sizes, is_training
from kdist.planning.weights import model_sizes, slots, unallocated

COUNT, MEASURE = "count", "measure"


def main() -> None:
    """Runs `run` on the arguments of the process: `count|measure REPORT script|module NAME [ARGS...]`."""
    way, report, kind, name, *arguments = sys.argv[1:]
    run(way, report, kind, name, arguments)


def run(way: str, report: str, kind: str, name: str, arguments: Sequence[str]) -> None:
    """Runs the script and writes the report.

    Args:
        way: str, `"count"`, in which large weights are not allocated, or `"measure"`.
        report: str, the path of the JSON that is written: sizes, or what is wrong.
        kind: str, `"script"` or `"module"`.
        name: str, the script or module.
        arguments: sequence of str, those of the script.
    """
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)) if kind == "script" else os.getcwd())
    try:
        with unallocated() if way == COUNT else contextlib.nullcontext():
            try:
                with stops_at_first_call():
                    if kind == "script":
                        runpy.run_path(name, run_name="__main__")
                    else:
                        runpy.run_module(name, run_name="__main__", alter_sys=True)
            except FirstCall as call:
                sizes = _sizes(call, way)
            else:
                raise KDistError(
                    f"The script trained no model. Received: {name}, which ended without fit, evaluate or predict. "
                    "Expected a model that is made and fitted in `with kdist.scope():`. Fix: plan the script that fits."
                )
    except KDistError as error:
        Path(report).write_text(json.dumps({"error": str(error)}))
        return
    Path(report).write_text(json.dumps(dataclasses.asdict(sizes)))


def _sizes(call: FirstCall, way: str) -> Sizes:
    before = status("VmRSS")
    is_trained = is_training(call.method)
    sizes = model_sizes(call.model, call.batch_size, inputs_of(call), is_trained=is_trained)
    data = call.data + call.copies
    sizes = dataclasses.replace(sizes, data=data, batches_per_step=call.batches_per_step, method=call.method)
    held = sizes.weights + sizes.slots + sizes.trained
    if way == COUNT or 1.5 * held + LEAST_ROWS * sizes.row > available():
        return dataclasses.replace(sizes, process=max(0, before - call.data), gathered=traced_gathers(call))
    with counted_gathers(call.model) as gathers:
        run_step(call, 1)
        gathered = gathers.num_bytes  # now, as the step's next trace clears it
    base, row = measure(lambda rows: run_step(call, rows), call.batch_size)
    if is_trained:  # by now it is known which of several optimizers updates what
        sizes = dataclasses.replace(sizes, slots=slots(call.model))
    held = sizes.weights + sizes.slots + sizes.trained
    sizes = dataclasses.replace(sizes, gathered=gathered, row=row, source="measured")
    return dataclasses.replace(sizes, process=max(0, base - held - call.data))
