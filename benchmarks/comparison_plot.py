"""The plot of a comparison: scaling efficiency, bars grouped by model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from models import MODELS
from quartiles import quartiles
from throughputs import Throughputs

INK, GRID = "#2b2b3a", "#e3e6ea"
# kdist is blue. The others have Okabe and Ito's palette without its blues: colour-blind readers can tell them apart.
OURS = ("#1d5b9e", "#4f97d7", "#a6cef0")
THEIRS = ("#d55e00", "#e69f00", "#f0e442", "#009e73", "#cc79a7")
GROUP = 0.86  # the width of a model's bars, of the distance between two models


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws the scaling efficiencies with their quartiles.

    Args:
        record: dict, what stands in `compare.json`.
        path: path, the file.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    found = Throughputs(record)
    engines = [name for name in CONTENDERS if CONTENDERS[name].is_kdist]
    peers = [name for name in CONTENDERS if CONTENDERS[name].is_peer]
    colors = {**dict(zip(engines, OURS, strict=True)), **dict(zip(peers, THEIRS, strict=True))}
    colors = {name: color for name, color in colors.items() if name in found.contenders}
    if not colors:
        return
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(figsize=(13, 5.2), layout="constrained")
    for place, (name, color) in enumerate(colors.items()):
        bars(axes, found, record["models"], name, color, place, len(colors))
    axes.axhline(1, color=INK, linewidth=1, zorder=3)
    axes.set_xticks(range(len(record["models"])), [label(record, name) for name in record["models"]])
    axes.set_ylabel("scaling efficiency of 2 processes")
    axes.set_title("Throughput of two processes, relative to twice the same framework's plain training", loc="left")
    axes.margins(x=0.01)
    axes.set_ylim(0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    caption = "bars: medians of the turns\nwhiskers: quartiles\n"
    figure.legend(loc="outside right upper", frameon=False, title=caption, alignment="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bars(axes: Any, found: Throughputs, models: list[str], name: str, color: str, place: int, count: int) -> None:
    """Draws a contender's bar of each model that it was measured on."""
    width = GROUP / count
    spots, heights, below, above = [], [], [], []
    for group, model in enumerate(models):
        if values := found.efficiencies(name, model):
            low, middle, high = quartiles(values)
            spots.append(group - GROUP / 2 + (place + 0.5) * width)
            heights.append(middle)
            below.append(middle - low)
            above.append(high - middle)
    axes.bar(
        spots,
        heights,
        0.92 * width,
        color=color,
        label=CONTENDERS[name].title.replace(" on tf_keras", "\non tf_keras"),
        yerr=[below, above],
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        zorder=2,
    )


def label(record: dict[str, Any], name: str) -> str:
    """Returns a model's name and size."""
    parameters = next((run["parameters"] for run in record["runs"] if run["model"] == name), 0)
    return f"{MODELS[name].title}\n{parameters / 1e6:.2g} M parameters"
