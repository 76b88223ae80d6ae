"""A thousand steps leave no more behind than a hundred; ten thousand: `python -m tests.endurance.full`."""

import pytest

from tests.endurance.full import check, measure
from tests.endurance.script import SAMPLES

STEPS = 1000
FLAT = [{"memory": 100_000, "files": 9, "threads": 20}] * SAMPLES


def test_nothing_grows():
    for samples in measure("mpi", STEPS, timeout=300, ranks=2).values():
        assert len(samples) == SAMPLES
        check(samples, STEPS)


def test_what_is_flat_passes():
    check(FLAT, STEPS)


@pytest.mark.parametrize("what", ["memory", "files", "threads"])
def test_what_grows_is_seen(what):
    step = 4 * STEPS // SAMPLES if what == "memory" else 1  # 4 KB a step
    grown = [{**sample, what: sample[what] + place * step} for place, sample in enumerate(FLAT)]
    slow = STEPS if what == "memory" else 1
    with pytest.raises(AssertionError, match=what):
        check([*grown[:-1], {**grown[-1], what: grown[-1][what] + slow}], STEPS)
