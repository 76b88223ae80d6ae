"""The position of a training in sharded data, as a part of the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from kdist.state.part import Place, State, StatePart
from kdist.trainer.feeding.epoch_iterator import Position, ShardedEpochIterator
from kdist.trainer.feeding.orders_by_hand import OrdersByHand


class ShardedData(StatePart):
    """The position in the data of a `fit` on several ranks.

    Attributes:
        place: `Place`, once a state is loaded.
    """

    name = "data"

    def __init__(self, iterator: ShardedEpochIterator, orders: OrdersByHand, epoch_step: int = 0) -> None:
        self._iterator = iterator
        self._orders = orders
        self._epoch_step = epoch_step
        self.place = Place(0, "its beginning")

    def state_dict(self) -> State:
        """Returns the position, and the hooks of the user's data that were called, with their random states."""
        hooks = self._iterator.data_adapter.hooks
        if self._epoch_step and hooks:
            hooks = hooks[:-1]  # without that of this epoch, which will be called again
        return {
            "position": dataclasses.asdict(self._iterator.position(self._epoch_step)),
            "epoch step": self._epoch_step,
            "some rows": self._iterator.data_adapter.fingerprint,
            "orders by hand": self._orders.skipped(),
            "hooks": [name for name, _ in hooks],
            **{f"hook/{number}": np.frombuffer(states, np.uint8) for number, (_, states) in enumerate(hooks)},
        }

    def is_of_other_data(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a state was saved in a `fit` on other rows, as far as that was saved."""
        own = self._iterator.data_adapter.fingerprint
        return state.get("some rows", own) != own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position, saved by any number of ranks."""
        if state["position"] is None:
            if state["epoch step"]:
                self.place = Place(0, "which starts again: several ranks cannot reproduce the order of one process")
            return
        before, adapter = Position(**state["position"]), self._iterator.data_adapter
        if before.kind != type(adapter.source).__name__ and before.epoch_step:
            self.place = Place(0, f"which starts again: its data was a {before.kind}, and is of another kind now")
            return
        self._orders.skip(state.get("orders by hand", {}))  # a script may look at its data in the first attempt only
        now = self._iterator.resume(before)
        states = [state[f"hook/{number}"].tobytes() for number in range(len(state["hooks"]))]
        adapter.repeat_hooks(list(zip(state["hooks"], states, strict=True)))
        change = "batch, learning rate and position in the data are converted"
        if before.group_size == now.group_size:
            change = "a step has the same batches"
        elif before.epoch_step:
            change += (
                f"; steps of this epoch: {before.epoch_step} with {before.group_size} batch(es) each correspond to "
                f"{now.epoch_step} with {now.group_size}"
            )
        if not now.epoch_step:
            again = "its beginning" if not before.epoch_step else "its beginning, after less than one step"
            self.place = Place(0, again, change)
            return
        source, how = adapter.source, ""
        if source.draws_in_background or source.is_skipped_by_reading:
            how = f": the data is read from the beginning of the pass, {now.pass_step} step(s) without training"
        self.place = Place(now.epoch_step, f"after {now.epoch_step} step(s){how}", change)
