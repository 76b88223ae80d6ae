"""How many samples a rank has seen, for a callback of `fit`."""

from __future__ import annotations

import keras


def rows_of_pass(model: keras.Model) -> float:
    """Returns this rank's samples in the epoch or the validation that runs, as Keras' loss metric counts them.

    Args:
        model: `keras.Model`.

    Returns:
        A number of samples; 0 for a model whose own steps do not update that metric.
    """
    tracker = getattr(model, "_loss_tracker", None)
    return 0.0 if tracker is None else float(tracker.count)
