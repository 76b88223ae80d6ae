"""Draws the guide's pictures: `python docs/pictures/draw.py [DIRECTORY]`; needs matplotlib."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from kdist import scaling

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "kdist", "font.family": "DejaVu Sans", "font.size": 10})

from matplotlib import pyplot as plt  # noqa: E402, after the choice of what draws

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INK, PAPER, ACCENT, QUIET = "#2b2b3a", "#ffffff", "#2563a8", "#e8eef5"


def effective_rate(path: Path) -> None:
    """The multiplier of the learning rate over 30 epochs on 4 ranks, for SGD and Adam."""
    epochs, steps_per_epoch, ranks = 30, 100, 4
    warmup = scaling.num_warmup_steps("auto", epochs, steps_per_epoch)
    steps = np.arange(epochs * steps_per_epoch + 1)
    figure, axes = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    for optimizer, color in (("SGD", ACCENT), ("Adam", "#b45309")):
        rule = scaling.learning_rate_rule("auto", optimizer, ranks)
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
    """From what one has to how one starts a script: questions, whose answer is a command."""
    figure, axes = canvas(7.8, 6.6)
    questions = {
        "Workers of\nunequal speed?": "kdist run --strategy parameter_server -np 4 train.py\n"
        "asynchronous; all others are synchronous and exact",
        "Machines that\ncome and go?": "kdist run --restarts 3 --min-np 2 -H a:2,b:2 train.py\n"
        "parameter servers: workers may come and go, too",
        "Does a service set TF_CONFIG?\n(Kubernetes, Vertex AI)": "python train.py\n"
        "on each machine, started by the service",
        "A queue, or the\ncluster's own MPI?": "srun python train.py\nmpirun or horovodrun -np N python train.py",
        "Several machines,\nreached by ssh?": "kdist run -H a:4,b:4 train.py",
        "Several GPUs?": "kdist run -np N train.py\nN: one for each GPU",
    }
    places = [6.15 - 0.98 * number for number in range(len(questions))]
    for y, (question, answer) in zip(places, questions.items(), strict=True):
        box(axes, 1.3, y, question, QUIET, width=2.5)
        box(axes, 5.7, y, answer, PAPER, width=4.0)
        arrow(axes, (2.55, y), (3.7, y), "yes")
    for start, end in itertools.pairwise([*places, places[-1] - 0.98]):
        arrow(axes, (1.3, start - 0.35), (1.3, end + 0.35), "no")
    box(axes, 1.3, places[-1] - 0.98, "python train.py\nuses all cores: try it first", PAPER, width=2.5)
    axes.text(
        3.7, places[-1] - 0.98, 'then perhaps kdist run -np N: see "How many ranks?"', color=INK, size=9, va="center"
    )
    save(figure, path)


def step(path: Path) -> None:
    """One training step on two ranks."""
    figure, axes = canvas(8.6, 3.8)
    parts = (
        "its rows of\nthe global batch",
        "forward pass,\nloss",
        "backward pass,\ngradients",
        "clip, update\nthe weights",
    )
    for rank, y in enumerate((3.2, 0.4)):
        axes.text(0.1, y + 0.45, f"process {rank}", color=INK, weight="bold")
        for place, part in enumerate(parts):
            x = 1.0 + 2.2 * place
            box(axes, x, y, part, QUIET, width=1.75)
            if place in (1, 2):
                arrow(axes, (x - 1.325, y), (x - 0.875, y))
    box(axes, 6.5, 1.8, "one message: the sum of all processes'\ngradients (all-reduce)", "#dcebd9", width=3.9)
    for y, end in ((2.85, 2.15), (0.75, 1.45)):
        arrow(axes, (5.4, y), (5.4, end))
        arrow(axes, (7.6, end), (7.6, y))
    axes.text(0.1, 1.8, "Both hold the whole model,\nand end with equal weights.", color=INK, size=9, va="center")
    save(figure, path)


def speed(path: Path) -> None:
    """The speed of kdist and its peers on two processes, as `benchmarks/compare.py` has measured them."""
    sys.path.insert(0, str(BENCHMARKS))
    import comparison_plot

    record = json.loads((BENCHMARKS / "results" / "compare.json").read_text())
    note = (
        "Two cores of a virtual machine, one a process; steady steps. A single\nratio is good to about 0.05. It is "
        "above 2 on the MLP, where a step of kdist's ranks is shorter than one of plain Keras."
    )
    comparison_plot.draw(record, path, note)


def engines(path: Path) -> None:
    """What an all-reduce costs by the size of the message, as `benchmarks/engines.py` has measured it."""
    sys.path.insert(0, str(BENCHMARKS))
    from engines import plot

    plot(json.loads((BENCHMARKS / "results" / "engines.json").read_text())["seconds"], path)


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
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    if start[0] == end[0]:
        axes.text(x + 0.08, y, text, color=INK, size=9, va="center")
    else:
        axes.text(x, y + 0.06, text, color=INK, size=9, ha="center")


def save(figure: Any, path: Path) -> None:
    """Writes a picture without the date, so that it changes only if what it shows does."""
    figure.savefig(path, metadata={"Date": None}, facecolor=PAPER)
    plt.close(figure)


# Inverted, and turned back to its hue: blue stays blue.
DARK = "@media (prefers-color-scheme: dark) {:root {filter: invert(0.9) hue-rotate(180deg)}}"


def add_dark_variant(path: Path) -> None:
    """Lets a picture be dark where the reader's system is."""
    path.write_text(path.read_text().replace("</style>", f"{DARK}</style>", 1))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (effective_rate, choose, step, speed, engines):
        path = folder / f"{draw.__name__}.svg"
        draw(path)
        add_dark_variant(path)


if __name__ == "__main__":
    main()
