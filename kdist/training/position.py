"""Where training stands in its data, and where the same place is for another number of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.data.source import Source


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the data of `fit`, between two steps. JSON can write it.

    Attributes:
        kind: str, the class of the source.
        seed: int, the base of the source's orders.
        group_size: int, the user's batches in a step of the job.
        batch_size: int or `None`, the rows of a batch of the user's, where it is the user's argument.
        extent: int or `None`, the samples (arrays) or batches of the user's input.
        steps_per_epoch: int or `None`, the user's own batches in an epoch, where given.
        num_steps: int or `None`, the steps of a pass over the data, once known.
        source_epoch: int, how many epochs the source began before the current one; -1 before the first.
        num_passes: int, how many passes over the data began before the current one.
        pass_epoch: int, the `source_epoch` in which the current pass began.
        pass_step: int, the steps that the current pass has made.
        epoch_step: int, the steps that the current epoch has made; 0 between epochs.
    """

    kind: str
    seed: int
    group_size: int
    batch_size: int | None
    extent: int | None
    steps_per_epoch: int | None
    num_steps: int | None
    source_epoch: int
    num_passes: int
    pass_epoch: int
    pass_step: int
    epoch_step: int

    def of_source(self, source: Source) -> Position:
        """Returns the same place in a source that takes more or fewer of the user's batches at a step.

        Where no step begins there, the step before is taken, so that nothing is left out: what it holds is seen again.
        """
        plan = source.plan
        here = dataclasses.replace(
            self,
            group_size=plan.group_size,
            batch_size=source.batch_size,
            extent=source.extent,
            steps_per_epoch=plan.steps_per_epoch,
            num_steps=source.num_steps if source.num_steps is not None else self.num_steps,
        )
        same = ("group_size", "batch_size", "extent", "steps_per_epoch")
        if all(getattr(here, name) == getattr(self, name) for name in same):
            return here
        if self.steps_per_epoch is None or plan.steps_per_epoch is None:
            step = _converted(self, here, self.pass_step)
            return dataclasses.replace(here, pass_step=step, epoch_step=step if self.epoch_step else 0)
        before = -(-self.steps_per_epoch // self.group_size)
        after = -(-plan.steps_per_epoch // plan.group_size)
        whole = (self.pass_step - self.epoch_step) // before
        epoch_step = min(_converted(self, here, self.epoch_step), after - 1)
        return dataclasses.replace(here, pass_step=whole * after + epoch_step, epoch_step=epoch_step)

    @property
    def batches(self) -> int:
        """The user's batches that the current epoch has taken, at most."""
        return self.epoch_step * self.group_size

    def asdict(self) -> dict[str, Any]:
        """Returns a dictionary that JSON can write."""
        return dataclasses.asdict(self)


def _converted(there: Position, here: Position, step: int) -> int:
    rows = step * there.group_size * (there.batch_size or 1)
    return rows // (here.group_size * (here.batch_size or 1))
