"""What a rank's share of an input costs, by the number of ranks: its pipeline alone, without a model or messages.

    python benchmarks/input_cost.py [--repeats 5] [--steps 200] [--only NAME ...] [--json FILE]

Each row is one way to give data to `fit`. One process plays rank 1 of N, and a graph iterates over that rank's steps,
as that of `fit` does, without Python. CPU time a step (`time.process_time`, which other processes on the machine
lengthen less than wall time), the least of the repeats, in turns, without what the start of an iterator takes; ratios
to the user's own pipeline, for one batch. Arrays are compared with Keras' own adapter.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, WIDTH = 64, 32
RANKS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--steps", type=int, default=500, help="steps of a rank in one turn")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--json", type=Path, help="write microseconds of CPU a step to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = pipelines(Path(folder), (max(RANKS) * arguments.steps + max(RANKS)) * BATCH)
        found = {
            name: measure(make, arguments.steps, arguments.repeats)
            for name, make in kinds.items()
            if not arguments.only or name in arguments.only
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


def pipelines(folder: Path, num_samples: int) -> dict[str, Callable[[], Any]]:
    """Returns a function that makes each pipeline, by its name."""
    import numpy as np
    import tensorflow as tf

    x, y = np.ones((num_samples, WIDTH), "float32"), np.ones((num_samples, 1), "float32")
    slices = tf.data.Dataset.from_tensor_slices((x, y))
    lines, records = folder / "lines.csv", folder / "rows.tfrecord"

    def step(row: Any, target: Any) -> Any:
        return row * 2, target

    def parse(line: Any) -> Any:
        numbers = tf.strings.to_number(tf.strings.split(line, ","))
        return tf.ensure_shape(numbers, [WIDTH]), numbers[:1]

    def decode(record: Any) -> Any:
        row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [WIDTH])
        return row, row[:1]

    lines.write_text((",".join("1" * WIDTH) + "\n") * num_samples)
    record = tf.io.serialize_tensor(x[0]).numpy()
    with tf.io.TFRecordWriter(str(records)) as writer:
        for _ in range(num_samples):
            writer.write(record)
    text, binary = tf.data.TextLineDataset(str(lines)), tf.data.TFRecordDataset(str(records))
    return {
        "slices.batch": lambda: slices.batch(BATCH),
        "slices.batch.cache.repeat.prefetch": lambda: slices.batch(BATCH).cache().repeat().prefetch(2),
        "slices.shuffle.batch": lambda: slices.shuffle(4096, seed=1).batch(BATCH),
        "slices.batch.map": lambda: slices.batch(BATCH).map(step),
        "slices.map.batch": lambda: slices.map(step).batch(BATCH),
        "slices.map.shuffle.batch": lambda: slices.map(step).shuffle(4096, seed=1).batch(BATCH),
        "slices.shuffle.map.batch.repeat": lambda: slices.shuffle(4096, seed=1).map(step).batch(BATCH).repeat(),
        "lines.map.batch": lambda: text.map(parse).batch(BATCH),
        "lines.map.shuffle.batch": lambda: text.map(parse).shuffle(4096, seed=1).batch(BATCH),
        "records.map.batch": lambda: binary.map(decode).batch(BATCH),
        "records.map.batch.repeat": lambda: binary.map(decode).batch(BATCH).repeat(),
        "records.map.shuffle.batch": lambda: binary.map(decode).shuffle(4096, seed=1).batch(BATCH),
        "arrays": lambda: (x, y),
    }


def measure(make: Callable[[], Any], steps: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds of CPU time a step, of the user's pipeline and of a rank's, by the number of ranks."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from kdist.data.arrays import ArraySource
    from kdist.data.sharding import Plan
    from kdist.data.tf_data import tf_data_source

    def source(plan: Plan) -> Any:
        made = make()
        if isinstance(made, tuple):
            return ArraySource(tf.nest.map_structure(tf.constant, made), len(made[0]), BATCH, plan, shuffle=True)
        return tf_data_source(made, plan)

    plans = {str(ranks): Plan(num_shards=ranks, shard_id=1) for ranks in RANKS}
    sources = {ranks: source(plan) for ranks, plan in plans.items()}
    plain = make()
    if isinstance(plain, tuple):
        plain = ArrayDataAdapter(*plain, batch_size=BATCH, shuffle=True).get_tf_dataset()
    ways = {"plain": plain, **{name: each.dataset() for name, each in sources.items()}}
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread spends CPU time, too
    lengths = (steps // 10, steps)
    passes = {
        (name, length): _pass_over(dataset.take(length).with_options(options))
        for name, dataset in ways.items()
        for length in lengths
    }
    found = {key: float("inf") for key in passes}
    for _ in range(repeats):
        for key, run in passes.items():
            found[key] = min(found[key], _cpu_time(run))
    short, long = lengths
    return {name: 1e6 * (found[name, long] - found[name, short]) / (long - short) for name in ways}


def _pass_over(dataset: Any) -> Callable[[], Any]:
    """Returns a traced function that iterates over a dataset."""
    import tensorflow as tf

    run = tf.function(lambda: dataset.reduce(tf.constant(0), lambda count, *_: count + 1)).get_concrete_function()
    run()
    return run


def _cpu_time(run: Callable[[], Any]) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


def table(found: dict[str, dict[str, float]]) -> str:
    """Returns the Markdown table."""
    head = "| input | plain, us a batch |" + "".join(f" {ranks} ranks |" for ranks in RANKS)
    rows = [head, "|---" * (2 + len(RANKS)) + "|"]
    for name, times in found.items():
        cells = "".join(f" {times[str(ranks)] / times['plain']:.2f} |" for ranks in RANKS)
        rows.append(f"| `{name}` | {times['plain']:.0f} |{cells}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
