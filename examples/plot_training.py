"""Draws what examples/callbacks.py wrote to its CSV: the loss, and where each rank's time went.

python examples/plot_training.py [training/training.csv] [training/training.png]
"""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source: str = "training/training.csv", target: str = "training/training.png") -> None:
    with open(source) as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    epochs = [row["epoch"] + 1 for row in rows]
    num_ranks = sum(key.startswith("input_rank_") for key in rows[0])
    figure, axes = plt.subplots(1, 1 + num_ranks, figsize=(4 + 2.5 * num_ranks, 3), layout="constrained")
    for name in ("loss", "val_loss"):
        axes[0].plot(epochs, [row[name] for row in rows], label=name)
    axes[0].set(xlabel="epoch", yscale="log")
    axes[0].legend()
    parts = ("compute", "input", "waiting")
    for rank, axis in enumerate(axes[1:]):
        axis.stackplot(epochs, [[row[f"{part}_rank_{rank}"] for row in rows] for part in parts], labels=parts)
        axis.set(title=f"rank {rank}", xlabel="epoch", ylim=(0, 1))
    axes[1].set(ylabel="share of the time")
    axes[-1].legend(loc="lower right")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
