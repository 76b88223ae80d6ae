"""Keras' progress bar without the logs that some callbacks keep from it."""

from __future__ import annotations

from typing import Any

import keras


class _ShortProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar without the logs that some callbacks name in `keys_not_in_bar`."""

    reads_state_between_steps = False

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__()
        self._callbacks = callbacks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows the other logs of an epoch."""
        hidden = {key for each in self._callbacks for key in each.keys_not_in_bar}
        super().on_epoch_end(epoch, {key: value for key, value in (logs or {}).items() if key not in hidden})


def shorten_progress_bar(listed: keras.callbacks.CallbackList) -> None:
    """Makes the progress bar of a list, if it has Keras' own, leave out what callbacks name in `keys_not_in_bar`.

    All other callbacks see the whole logs. It is for `on_list_ready`.
    """
    # Not the list itself: that would be a circle, and the callbacks would live until it is collected.
    callbacks = [each for each in listed.callbacks if hasattr(each, "keys_not_in_bar")]
    for place, each in enumerate(listed.callbacks):
        if type(each) is keras.callbacks.ProgbarLogger:
            listed.callbacks[place] = bar = _ShortProgressBar(callbacks)
            bar.set_model(each.model)
            if each.params is not None:
                bar.set_params(each.params)
