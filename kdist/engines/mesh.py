"""A mesh of ranks: replicas, which train on different rows, by stages, which hold different parts of the model."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import EngineError


class Mesh:
    """The place of each rank among replicas and stages, and the engines of its row and of its column.

    The stages of a replica are neighbours: rank `r` is stage `r % num_stages` of replica `r // num_stages`, so that
    the messages between stages, the larger ones, stay on one host where they can.

    Collective: every rank must call this, in the same order.

    Args:
        world: `Engine` of all ranks.
        num_stages: int, into how many stages a model is divided; it divides the number of ranks.

    Attributes:
        world: `Engine`.
        num_replicas: int.
        num_stages: int.
        replica: int, this rank's replica, from 0.
        stage: int, this rank's stage, from 0.
        replicas: `Engine` of this rank's stage in all replicas; its rank is `replica`.
        stages: `Engine` of all stages of this rank's replica; its rank is `stage`.

    Raises:
        EngineError: if `num_stages` does not divide the number of ranks, or the engine has no groups.

    Example:
        >>> mesh = Mesh(engine, num_stages=2)  # doctest: +SKIP
        >>> gradients = mesh.replicas.allreduce(gradients)  # doctest: +SKIP
    """

    def __init__(self, world: Engine, num_stages: int = 1) -> None:
        if num_stages < 1 or world.size % num_stages:
            raise EngineError(
                f"The ranks do not form a mesh. Received: {world.size} rank(s) and num_stages={num_stages}. Expected: "
                "a number of stages that divides the number of ranks. Fix: start a multiple of num_stages processes."
            )
        self.world = world
        self.num_replicas, self.num_stages = world.size // num_stages, num_stages
        self.replica, self.stage = self.place_of(world.rank)
        self.replicas = _engine(world, range(self.stage, world.size, num_stages))
        self.stages = _engine(world, range(self.replica * num_stages, (self.replica + 1) * num_stages))

    def place_of(self, rank: int) -> tuple[int, int]:
        """Returns the replica and the stage of a rank of `world`."""
        return divmod(rank, self.num_stages)


def _engine(world: Engine, ranks: Sequence[int]) -> Engine:
    # Without a message where there is nothing to divide: engines without groups have meshes of one stage, too.
    if len(ranks) == world.size:
        return world
    return SingleEngine() if len(ranks) == 1 else world.group(ranks)
