"""The tables of a comparison, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from contenders import CONTENDERS
from contenders.task import INPUTS
from models import MODELS
from quartiles import quartiles
from throughputs import Throughputs

CORES = {
    "cpu": "Each process has one core and one thread",
    "gpu": "All processes share one GPU. XLA is `compile`'s default where a row says no other: Keras uses it in one "
    "process, and not on several ranks of kdist. Each process has an equal share of the cores",
}
HEAD = """\
# kdist and its peers

`{command}`, {turns} turn(s). {machine}.

{cores}, and in each step {batches}. float32, SGD with momentum.
All but one ask for huge pages (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`), as the ranks of `kdist run` do.
`fit` is given {input}.
A step takes the median time between the ends of two batches of one long epoch, where a table says no other.
Medians over the turns of ratios within a turn, and in parentheses their quartiles. Ratios are those of throughput:
above 1, the first one is faster. Horovod's background thread shares its rank's core. PyTorch's embedding has a dense
gradient, its default; TensorFlow's is sparse.
"""


def tables(record: dict[str, Any]) -> str:
    """Returns all of it.

    Args:
        record: dict, what stands in `compare.json`.
    """
    found, by_epoch, by_fit = (Throughputs(record, way) for way in ("steady", "epoch", "fit"))
    models = record["models"]
    engines = [name for name in found.contenders if CONTENDERS[name].is_kdist]
    peers = [name for name in found.contenders if CONTENDERS[name].is_peer]
    together = [*engines, *peers, *(name for name in found.contenders if name.startswith("plain_pair"))]
    parts = [
        head(record),
        "## Scaling efficiency\n\nThe throughput of two ranks, relative to twice that of the same framework's plain "
        "training in one process. Two that are side by side and exchange nothing say what the machine takes: ranks go "
        "at the pace of the slower one, in each step of the one that is slower in it.",
        table(record, {title(name): each(found.efficiencies, name, models) for name in together}),
        "By the epoch's time, from its beginning to its end:",
        table(record, {title(name): each(by_epoch.efficiencies, name, models) for name in together}),
        "By the time of the whole `fit`, from its call to its return. Plain Keras waits at its end for `tf.data`'s "
        "tuner, in some processes for seconds and in others not: a ratio above 1 may be that alone.",
        table(record, {title(name): each(by_fit.efficiencies, name, models) for name in together}),
        "## kdist against the best of the others, by efficiency\n\nkdist's efficiency, relative to that of the peer "
        "whose median efficiency is highest.",
        table(record, against_best(found, engines, peers, models)),
        "## kdist's best engine against each peer, by samples/s",
        table(record, by_throughput(found, engines, peers, models)),
        "## In one process, and what a check costs",
        table(record, others(found, models)),
        "## Samples/s\n\nOf all processes together. Medians of the turns.",
        table(record, {title(name): samples(found, name, models) for name in found.contenders}),
        "## Milliseconds a step\n\nMedians of the turns. What `fit` takes beside its epoch: its begin, and the wait "
        "for `tf.data`'s threads at its end.",
        milliseconds(record, found.contenders),
        failures(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def head(record: dict[str, Any]) -> str:
    """Returns what was measured, and on what."""
    sizes: dict[int, list[str]] = {}
    for name in record["models"]:
        sizes.setdefault(MODELS[name].batch, []).append(MODELS[name].title)
    batches = " and ".join(f"{size} rows of its own ({', '.join(names)})" for size, names in sizes.items())
    given = INPUTS[record.get("input", "arrays")]
    cores = CORES[record.get("device", "cpu")]
    return HEAD.format(**{**record, "batches": batches, "input": given, "cores": cores}).strip()


def table(record: dict[str, Any], rows: dict[str, list[str]]) -> str:
    """Returns a table with a column for each model."""
    if not rows:
        return "Nothing was measured for this."
    parameters = {run["model"]: f"{run['parameters']:,}".replace(",", " ") for run in record["runs"]}
    columns = [f"{MODELS[name].title}, {parameters.get(name, '?')} parameters" for name in record["models"]]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def against_best(
    found: Throughputs, engines: Sequence[str], peers: Sequence[str], models: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the rows of kdist's efficiency relative to the best peer's."""
    if not engines or not peers:
        return {}

    def named(names: Sequence[str], model: str) -> str:
        best = found.best(names, model)
        return f"{title(best)}: {cell(found.efficiencies(best, model))}" if best else ""

    def relative(name: str, model: str) -> list[float]:
        rival = found.best(peers, model)
        return found.relative_efficiencies(name, rival, model) if name and rival else []

    return {
        "the best peer's efficiency": [named(peers, model) for model in models],
        "kdist's best": [named(engines, model) for model in models],
        "**kdist's best, relative to the best peer**": [
            cell(relative(found.best(engines, model), model)) for model in models
        ],
        **{f"{title(name)}, relative to it": each(relative, name, models) for name in engines},
    }


def by_throughput(
    found: Throughputs, engines: Sequence[str], peers: Sequence[str], models: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the rows of kdist's throughput relative to each peer's."""
    best = {model: found.best(engines, model) for model in models}
    return {
        f"kdist, relative to {title(peer)}": [
            cell(found.ratios(best[model], peer, model) if best[model] else []) for model in models
        ]
        for peer in (peers if engines else ())
    }


def others(found: Throughputs, models: Sequence[str]) -> dict[str, list[str]]:
    """Returns the rows of what is compared beside, as far as it was measured."""
    pairs = {
        "one rank in the scope, relative to plain Keras 3": ("scope", "plain_keras"),
        "plain Keras 3, relative to the same without huge pages": ("plain_keras", "plain_small_pages"),
        "plain Keras 3, relative to plain tf_keras": ("plain_keras", "plain_tf_keras"),
        "plain PyTorch, relative to plain tf_keras": ("plain_pytorch", "plain_tf_keras"),
        "plain Keras on JAX, relative to plain tf_keras": ("plain_jax", "plain_tf_keras"),
        "kdist over MPI with ReplicaCheck(every=1), relative to without": ("kdist_checked", "kdist_mpi"),
    }
    rows = {
        what: [cell(found.ratios(*names, model)) for model in models]
        for what, names in pairs.items()
        if set(names) <= set(found.contenders)
    }
    if {"kdist_checked", "kdist_mpi"} <= set(found.contenders):
        checked = [found.ratios("kdist_checked", "kdist_mpi", model) for model in models]
        # Few steps would hold a check at every hundredth, so its cost is taken from one at every step.
        rows["the same with every=100, calculated"] = [
            cell([1 / (1 + (1 / ratio - 1) / 100) for ratio in ratios]) for ratios in checked
        ]
    return rows


def failures(record: dict[str, Any]) -> str:
    """Returns who was left out, and what failed."""
    lines = [f"- {title(name)} was left out: {what}." for name, what in record["left_out"].items()]
    for failure in record["failures"]:
        said = "".join(f"\n      {line[:200]}" for line in failure["last lines"])
        lines.append(f"- {title(failure['contender'])}, turn {failure['turn'] + 1}: {failure['problem']}.{said}")
    return "\n".join(["## Left out, or failed\n", *lines]) if lines else ""


def each(values: Callable[[str, str], list[float]], name: str, models: Sequence[str]) -> list[str]:
    """Returns a contender's cells, one a model."""
    return [cell(values(name, model)) for model in models]


def samples(found: Throughputs, name: str, models: Sequence[str]) -> list[str]:
    """Returns a contender's samples/s, one cell a model."""
    return [f"{quartiles(values)[1]:.0f}" if (values := found.of(name, model)) else "" for model in models]


def milliseconds(record: dict[str, Any], names: Sequence[str]) -> str:
    """Returns a table of a step's time in each way of measuring it, one row for each model and contender."""
    lines = ["| model | | steady | epoch | `fit` | `fit` - epoch |", "|---" * 6 + "|"]
    for model in record["models"]:
        for name in names:
            runs = [run for run in record["runs"] if (run["model"], run["contender"]) == (model, name)]
            times = [run["seconds a step"] for run in runs]
            if times:
                ways = [[each[way] for each in times] for way in ("steady", "epoch", "fit")]
                ways.append([each["fit"] - each["epoch"] for each in times])
                cells = " | ".join(f"{1000 * quartiles(values)[1]:.2f}" for values in ways)
                lines.append(f"| {MODELS[model].title} | {title(name)} | {cells} |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """Returns the median, and the quartiles in parentheses."""
    if not values:
        return ""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def title(name: str) -> str:
    """Returns a contender's name as readers know it."""
    return CONTENDERS[name].title
