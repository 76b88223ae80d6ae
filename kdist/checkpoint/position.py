"""The position of a training in its data, and its conversion to another number of ranks."""

from __future__ import annotations

import dataclasses

from kdist.data.source import Source


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in the data of `fit`, between two steps.

    Attributes:
        kind: str, the class of the source.
        seed: int, the seed of the source's orders.
        group_size: int, the user's batches in one step.
        batch_size: int or `None`, the rows of the user's batch, if given as an argument.
        extent: int or `None`, the samples (arrays) or batches of the user's input.
        steps_per_epoch: int or `None`, the user's batches in an epoch, if given.
        num_steps: int or `None`, the steps of a pass over the data, if known.
        source_epoch: int, the epochs that the source began before the current one; -1 before the first.
        num_passes: int, the passes over the data that began before the current one.
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

    def in_source(self, source: Source) -> Position:
        """Returns the same position in a source whose steps have another number of the user's batches.

        If no step begins there, the previous step is repeated, so that no sample is left out.
        """
        plan = source.plan
        now = dataclasses.replace(
            self,
            group_size=plan.group_size,
            batch_size=source.batch_size,
            extent=source.cardinality,
            steps_per_epoch=plan.steps_per_epoch,
            num_steps=source.num_steps,
        )
        same = ("group_size", "batch_size", "extent", "steps_per_epoch")
        if all(getattr(now, name) == getattr(self, name) for name in same):
            # A pass over data of unknown length has told it; with other steps, it has to tell it again.
            return now if now.num_steps is not None else dataclasses.replace(now, num_steps=self.num_steps)
        if self.steps_per_epoch is None or plan.steps_per_epoch is None:
            step = _converted(self, now, self.pass_step)
            return dataclasses.replace(now, pass_step=step, epoch_step=step if self.epoch_step else 0)
        before = -(-self.steps_per_epoch // self.group_size)
        after = -(-plan.steps_per_epoch // plan.group_size)
        whole = (self.pass_step - self.epoch_step) // before
        epoch_step = min(_converted(self, now, self.epoch_step), after - 1)
        return dataclasses.replace(now, pass_step=whole * after + epoch_step, epoch_step=epoch_step)


def _converted(before: Position, now: Position, step: int) -> int:
    rows = step * before.group_size * (before.batch_size or 1)
    return rows // (now.group_size * (now.batch_size or 1))
