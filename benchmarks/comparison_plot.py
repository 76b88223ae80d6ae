"""The plot of a comparison: who is faster on two processes, and by how much two beat one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from models import MODELS
from quartiles import quartiles
from throughputs import Throughputs

INK, PAPER, GRID = "#2b2b3a", "#ffffff", "#e3e6ea"
OURS = "kdist_mpi"
# kdist is blue. The others have Okabe and Ito's palette without its blues: colour-blind readers can tell them apart.
COLORS = {
    OURS: "#1d5b9e",
    "horovod_mpirun": "#e69f00",
    "multi_worker": "#009e73",
    "ddp": "#d55e00",
    "jax_parallel": "#cc79a7",
}
IDEAL = 2  # times the speed of one process
GROUP = 0.84  # the width of a model's bars, of the distance between two models


def draw(record: dict[str, Any], path: Path, note: str = "") -> None:
    """Draws samples per second relative to kdist's, and the speed-up over one process, with their quartiles.

    Args:
        record: dict, what stands in `compare.json`.
        path: path, the file, an SVG.
        note: str, what a reader of the numbers must know.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    found, models = Throughputs(record), record["models"]
    names = [name for name in COLORS if name in found.contenders]
    if OURS not in names:
        return
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    plt.rcParams.update({"svg.hashsalt": "kdist"})
    figure, (speeds, speedups) = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    bars(speeds, models, names, lambda name, model: found.ratios(name, OURS, model))
    bars(speedups, models, names, lambda name, model: found.ratios(name, CONTENDERS[name].base, model))
    speeds.set_title("Samples per second of two processes, kdist = 1: longer is faster", loc="left")
    speedups.set_title("Two processes against one of the same framework: 2 is ideal, hatched is above it", loc="left")
    speedups.axhline(IDEAL, color=INK, linewidth=1, linestyle="--", zorder=3)
    for axes in (speeds, speedups):
        axes.set_xticks(range(len(models)), [label(record, name) for name in models])
        axes.margins(x=0.01)
        axes.set_ylim(0)
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
    handles, titles = speeds.get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside upper left", frameon=False, ncols=3, fontsize=9)
    caption = f"Bars: medians of the turns; whiskers: quartiles. {note}".strip()
    figure.supxlabel(caption, fontsize=9, color=INK, x=0.02, ha="left")
    figure.savefig(path, metadata={"Date": None}, facecolor=PAPER)  # it changes only if what it shows does
    plt.close(figure)


def bars(axes: Any, models: list[str], names: list[str], values: Callable[[str, str], list[float]]) -> None:
    """Draws each contender's bar of each model that it was measured on, with its number."""
    width = GROUP / len(names)
    for place, name in enumerate(names):
        for group, model in enumerate(models):
            if not (found := values(name, model)):
                continue
            low, middle, high = quartiles(found)
            spot = group - GROUP / 2 + (place + 0.5) * width
            title = CONTENDERS[name].title if group == 0 else None
            error = {"ecolor": INK, "elinewidth": 1, "capsize": 2}
            spread = [[middle - low], [high - middle]]
            axes.bar(spot, middle, 0.92 * width, color=COLORS[name], label=title, yerr=spread, error_kw=error, zorder=2)
            if middle > IDEAL:
                style = {"color": PAPER, "edgecolor": COLORS[name], "hatch": "////", "zorder": 2}
                axes.bar(spot, middle - IDEAL, 0.92 * width, bottom=IDEAL, **style)
            text = {"textcoords": "offset points", "ha": "center", "size": 7.5, "zorder": 4}
            box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}
            axes.annotate(f"{middle:.2f}", (spot, high), (0, 4), bbox=box, **text)


def label(record: dict[str, Any], name: str) -> str:
    """Returns a model's name and size."""
    parameters = next((run["parameters"] for run in record["runs"] if run["model"] == name), 0)
    return f"{MODELS[name].title}\n{parameters / 1e6:.2g} M parameters"
