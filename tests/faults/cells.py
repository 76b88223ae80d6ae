"""The cells of the fault campaign, and what must come of each."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from tests.faults import script
from tests.helpers import spmd
from tests.helpers.jobs import ENGINES, job
from tests.helpers.pairwise import pairwise

KINDS = ("raise", "sys.exit 3", "sys.exit 0", "os._exit 5", "SIGKILL", "SIGSEGV", "SIGSTOP")
MOMENTS = ("start", "build", "first step", "epoch", "validation", "save", "end")
RANKS = (0, 1)
SIZE = 2
LIMIT = 60.0  # seconds, start and stall timeout included; a generous guard for a busy machine


@dataclasses.dataclass(frozen=True)
class Cell:
    """One job that breaks.

    Attributes:
        engine: str, one of `ENGINES`.
        kind: str, one of `KINDS`.
        moment: str, one of `MOMENTS`.
        rank: int, who breaks.
    """

    engine: str
    kind: str
    moment: str
    rank: int

    @property
    def may_end_well(self) -> bool:
        """Whether nobody is lost: a script that ends itself when all is done."""
        return self.kind == "sys.exit 0" and self.moment == "end"

    @property
    def is_unknown(self) -> bool:
        """Whether the rank is lost without a word, and before any other rank knows of it."""
        return self.kind in ("sys.exit 0", "SIGSTOP") and self.moment == "start"

    @property
    def code(self) -> int | None:
        """The code that the job must end with, where one is promised."""
        if self.may_end_well:
            return 0
        if self.engine == "horovod over gloo":
            return None  # horovodrun ends with 1, whatever its ranks end with
        return {"raise": 1, "sys.exit 3": 3, "os._exit 5": 5}.get(self.kind)

    def run(self) -> spmd.Finished:
        """Runs the job, to its end or the time limit."""
        command = ["-m", script.__name__, self.kind, self.moment, str(self.rank)]
        return job(self.engine, SIZE).launch(command, timeout=LIMIT)

    def check(self, ended: spmd.Finished) -> None:
        """Asserts that the job has ended, with the right code and a message that names the rank."""
        said = ended.output[-6000:]
        assert not ended.timed_out, f"the job hung\n{said}"
        if self.code is not None:
            assert ended.returncode == self.code, f"exit code {ended.returncode}, expected {self.code}\n{said}"
        assert (ended.returncode == 0) == self.may_end_well, f"exit code {ended.returncode}\n{said}"
        if not self.may_end_well:
            is_named = names_rank(ended.output, self.rank) or (self.is_unknown and "ot all ranks" in ended.output)
            assert is_named, f"rank {self.rank} is not named\n{said}"
        if self.kind == "raise":
            count = ended.output.count("ValueError: broken on purpose")
            assert count == 1, f"the error is printed {count} times\n{said}"


def names_rank(output: str, rank: int) -> bool:
    """Returns whether the job's or the launcher's last words name a rank."""
    return bool(re.search(rf"rank {rank}\b|[Pp]rocess {rank}\b|@\d+,{rank}\]|task {rank}\b", output))


def all_cells(engines: Sequence[str] = tuple(ENGINES)) -> list[Cell]:
    """Returns the whole matrix."""
    return [Cell(*each) for each in itertools.product(engines, KINDS, MOMENTS, RANKS)]


def covering_cells(engines: Sequence[str] = tuple(ENGINES)) -> list[Cell]:
    """Returns cells in which every two of an engine, a kind and a moment meet; the ranks take turns."""
    cells = pairwise(engines, KINDS, MOMENTS)
    return [
        Cell(str(engine), str(kind), str(moment), RANKS[number % 2])
        for number, (engine, kind, moment) in enumerate(cells)
    ]


FEW = (
    Cell("mpi", "raise", "start", 0),
    Cell("mpi", "sys.exit 3", "build", 1),
    Cell("mpi", "sys.exit 0", "first step", 0),
    Cell("horovod over gloo", "SIGKILL", "epoch", 1),
    Cell("mpi", "SIGKILL", "validation", 0),
    Cell("collective", "raise", "save", 1),
    Cell("mpi", "SIGSEGV", "end", 1),
)
"""What CI runs: each moment."""
