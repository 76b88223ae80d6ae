"""Draws the guide's pictures: `python docs/pictures/draw.py [DIRECTORY]`; needs matplotlib."""

import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from kdist import scaling

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "kdist", "font.family": "DejaVu Sans", "font.size": 10})

from matplotlib import pyplot as plt  # noqa: E402, after the choice of what draws

INK, PAPER, ACCENT, QUIET = "#2b2b3a", "#ffffff", "#2563a8", "#e8eef5"


def effective_rate(path: Path) -> None:
    """The multiplier of the learning rate over 30 epochs on 4 ranks, for SGD and Adam."""
    epochs, steps_per_epoch, ranks = 30, 100, 4
    warmup = scaling.num_warmup_steps("auto", epochs, steps_per_epoch)
    steps = np.arange(epochs * steps_per_epoch + 1)
    figure, axes = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    for optimizer, color in (("SGD", ACCENT), ("Adam", "#b45309")):
        rule = scaling.learning_rate_rule("auto", optimizer, ranks, scale_batch=True)
        rates = [scaling.warmup_multiplier(step, rule.factor, warmup) for step in steps]
        axes.plot(steps, rates, color=color, linewidth=2)
        axes.annotate(f"{optimizer}: {rule.name}, {rule.factor:g} times", (steps[-1], rates[-1]), (-4, -14), ha="right",
                      textcoords="offset points", color=color)  # fmt: skip
    axes.axvline(warmup, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("end of the warm-up", (warmup, 1.15), (6, 0), textcoords="offset points", color=INK)
    axes.set(xlabel=f"step ({steps_per_epoch} an epoch, {epochs} epochs)", ylabel="effective rate / your rate")
    axes.set(ylim=(0.8, 4.3), xlim=(0, steps[-1]))
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def choose(path: Path) -> None:
    """From what one has to how one starts a script."""
    figure, axes = canvas(7.4, 5.2)
    rows = {
        "One machine": "kdist run -np N train.py\nN: one a GPU, or one for a core or two",
        "A queue, or the\ncluster's MPI": "srun python train.py\nmpirun or horovodrun -np N python train.py",
        "A service that\nsets TF_CONFIG": "python train.py\non every machine, started by the service",
        "Hosts with ssh": "kdist run -H a:4,b:4 train.py",
    }
    places = [4.6 - 1.1 * number for number in range(len(rows))]
    for y, (what, how) in zip(places, rows.items(), strict=True):
        box(axes, 1.2, y, what, QUIET)
        box(axes, 5.3, y, how, PAPER, width=3.8)
        arrow(axes, (2.2, y), (3.4, y), "yes")
    for start, end in itertools.pairwise(places):
        arrow(axes, (1.2, start - 0.35), (1.2, end + 0.35), "no")
    box(axes, 1.95, 0.2, "synchronous: exact, the default", "#dcebd9", width=3.5)
    box(axes, 5.5, 0.2, "--strategy parameter_server: asynchronous", "#f6e3cf", width=3.4)
    save(figure, path)


def step(path: Path) -> None:
    """One training step on two ranks."""
    figure, axes = canvas(8.6, 4.0)
    parts = {
        "its rows of\nthe global batch": "data/",
        "forward, loss by\nglobal denominators": "step/",
        "gradients,\nits share of them": "",
        "clip, check, update:\nKeras' own": "",
    }
    for rank, y in enumerate((3.3, 0.5)):
        axes.text(-0.1, y + 0.5, f"rank {rank}", color=INK, weight="bold")
        for place, (part, room) in enumerate(parts.items()):
            x = 1.0 + 2.2 * place
            box(axes, x, y, part, QUIET, width=1.75)
            axes.text(x, y - 0.6, room, ha="center", color=ACCENT, size=9)
            if place in (1, 2):
                arrow(axes, (x - 1.35, y), (x - 0.85, y))
    box(axes, 6.5, 1.9, "one message: sums of gradients,\nstatistics and votes", "#dcebd9", width=3.9)
    axes.text(4.4, 1.9, "engines/", color=ACCENT, size=9, va="center", ha="right")
    for y, end in ((2.95, 2.25), (0.85, 1.55)):
        arrow(axes, (5.4, y), (5.4, end))
        arrow(axes, (7.6, end), (7.6, y))
    save(figure, path)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure without axes, in inches."""
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(-0.2, width + 0.2), ylim=(-0.3, height + 0.1))
    axes.axis("off")
    return figure, axes


def box(axes: Any, x: float, y: float, text: str, color: str, width: float = 2.0) -> None:
    """Draws a box around a text, centred at a place."""
    corner, height = (x - width / 2, y - 0.35), 0.7
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(matplotlib.patches.FancyBboxPatch(corner, width, height, boxstyle=style, fc=color, ec=INK, lw=0.9))
    axes.text(x, y, text, ha="center", va="center", color=INK, size=9)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draws an arrow, with a word beside it."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0})
    if text:
        axes.text((start[0] + end[0]) / 2 + 0.06, (start[1] + end[1]) / 2 + 0.08, text, color=INK, size=9)


def save(figure: Any, path: Path) -> None:
    """Writes a picture without the date, so that it changes only if what it shows does."""
    figure.savefig(path, metadata={"Date": None}, facecolor=PAPER)
    plt.close(figure)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (effective_rate, choose, step):
        draw(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
