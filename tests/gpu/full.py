"""The suite for machines with GPUs: `python -m tests.gpu.full --out FILE`, a table in Markdown of what ran on what.

One rank on a GPU against plain Keras; several that share one, over each engine, against one process; and with two GPUs
or more one rank each, over NCCL. `--device cpu` runs the same on CPUs, to test the suite itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

import kdist
from kdist.engines.horovod import built_with_nccl
from tests.gpu.parts import ENGINES, GIVEN, TARGET, parts
from tests.helpers.campaign import Campaign

NO_GPU = (
    "No GPU to run on. Received: no device of kind GPU from TensorFlow {version} (CUDA_VISIBLE_DEVICES={visible!r}). "
    "Expected one GPU or more. Fix: pip install 'tensorflow[and-cuda]' on a machine with an NVIDIA GPU and its driver, "
    "and leave CUDA_VISIBLE_DEVICES unset; --device cpu runs the suite on CPUs, which tests the suite and no GPU."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; returns 0 if all passed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.full", description=__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many share a device")
    parser.add_argument("--engines", nargs="+", choices=["one rank", *ENGINES], help="all by default")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="PART_OF_NAME", help="only cases with such names")
    parser.add_argument("--out", type=Path, help="where the table goes, after each launch; shown as well")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a launch may take")
    options = parser.parse_args(argv)
    gpus = tf.config.list_physical_devices("GPU") if options.device == "gpu" else []
    if options.device == "gpu" and not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        print(NO_GPU.format(version=tf.__version__, visible=visible), file=sys.stderr)
        return 2
    names = [str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)) for gpu in gpus]
    tf.config.set_visible_devices([], "GPU")  # this process starts ranks, and takes no memory from them
    has_horovod = importlib.util.find_spec("horovod") is not None
    has_nccl = has_horovod and built_with_nccl()
    campaign = Campaign(options.out, head(names, has_horovod, has_nccl))
    visible = visible_names(len(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for part in parts(visible, has_horovod=has_horovod, horovod_has_nccl=has_nccl, ranks=options.ranks):
        cases = [name for name in part.names if any(each in name for each in options.cases)]
        if cases and (options.engines is None or part.column.partition(",")[0] in options.engines):
            campaign.run(
                part.title, part.column, part.on, TARGET, cases, timeout=options.timeout, given=GIVEN, env=part.env
            )
    print(campaign.text())
    return 1 if campaign.errors else 0


def visible_names(count: int, variable: str | None) -> list[str]:
    """Returns what `CUDA_VISIBLE_DEVICES` calls the GPUs that TensorFlow sees.

    Example:
    >>> visible_names(2, None), visible_names(2, "3,5,-1,6")
    (['0', '1'], ['3', '5'])
    """
    return [str(number) for number in range(count)] if variable is None else variable.split(",")[:count]


def head(gpus: Sequence[str], has_horovod: bool, has_nccl: bool) -> str:
    """Returns what the table says of the machine."""
    devices = ", ".join(gpus) if gpus else f"no GPU: {os.cpu_count()} CPUs, which tests the suite itself"
    horovod = f"Horovod {'with' if has_nccl else 'without'} NCCL" if has_horovod else "no Horovod"
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, kdist {kdist.__version__}"
    left_out = "" if len(gpus) > 1 else " Not run, for want of a second GPU: NCCL."
    return f"{datetime.date.today()}, on {devices}; {versions}, {horovod}.{left_out}"


if __name__ == "__main__":
    sys.exit(main())
