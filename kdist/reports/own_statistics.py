"""What is said of layers that take statistics of each rank's own rows."""

from __future__ import annotations

from kdist.reports.log import once


def tell_of_own_statistics(layer: str) -> None:
    """Says once that batch normalization is not synchronised.

    Args:
        layer: str, the layer's name.
    """
    once.info(
        f"BatchNormalization {layer!r} normalizes by the rows of each rank, where one process takes those of the "
        "global batch. For equal results: BatchNormalization(synchronized=True), which sends a message a layer",
        key="BatchNormalization",
    )
