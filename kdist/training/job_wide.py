"""Callbacks that all ranks run if one of them was given them, and that are the last to be called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from kdist.training import _keras_internals as internals

if TYPE_CHECKING:
    from kdist.training.replicated_model import ReplicatedModel


class JobWide(keras.callbacks.Callback):
    """A callback that knows the others of its list and comes after them.

    Attributes:
        others: list of the other callbacks.
        siblings: list of those of its kind, which are not among the others where there are several ranks.
        owner: the `ReplicatedModel`, or `None` in one process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Any] = []
        self.siblings: list[JobWide] = []
        self.owner: ReplicatedModel | None = None

    def settings(self) -> dict[str, Any]:
        """Returns the arguments that make an equal one, as JSON can write them."""
        raise NotImplementedError

    def take(self, settings: dict[str, Any]) -> None:
        """Takes over the settings that all ranks go by."""
        for name, value in settings.items():
            setattr(self, name, value)

    def join(self, owner: ReplicatedModel, others: list[Any], siblings: list[JobWide]) -> None:
        """Is told, among several ranks, of the model and of the others that it is given."""
        self.owner, self.others, self.siblings = owner, others, siblings

    def leave(self) -> None:
        """Is told that the verb has ended, well or not."""
        self.owner = None

    def set_model(self, model: keras.Model) -> None:
        """Takes its place at the end of the list, in one process, where nobody else arranges it."""
        super().set_model(model)
        if self.owner is None:
            container = internals.calling_list()
            if container is not None:
                self.others = [each for each in container.callbacks if each is not self]
                # Not in place: the list is being walked through.
                container.callbacks = [*self.others, self]

    @property
    def is_chief(self) -> bool:
        """Whether this rank reads and writes."""
        return self.owner is None or self.owner.engine.rank == 0
