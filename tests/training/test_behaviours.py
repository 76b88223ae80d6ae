"""What a user may count on beyond equal weights: most cases of behaviours_*.py, on 2 ranks.

All of them: `python -m tests.training.full --only behaviours`.
"""

import pytest

from tests.helpers import spmd
from tests.training.full import TARGETS

TARGET = TARGETS["behaviours"]

# Slow ones that resemble another.
SLOW = (
    "a_global_batch_that_may_change_is_warned_of",
    "a_second_fit_does_not_warm_up_again",
    "arrays_in_batches",
    "augmentation_in_a_map_differs_too",
    "in_order_without_shuffle",
    "masks_differ_between_ranks_and_runs_are_reproducible",
    "models_that_differ_in_a_loop",
    "momentum_where_updates_are_left_out",
    "momentum_while_gradients_accumulate",
    "nesterov_linear_with_correction",
    "one_rank_sets_the_rate_at_the_end_of_an_epoch",
    "one_rank_sets_the_rate_between_two_fits",
    "one_rank_stops_at_the_end_of_an_epoch",
    "own_streams_and_several_steps_an_execution",
    "own_streams_of_unequal_lengths",
    "py_dataset_shuffled_twice",
    "py_dataset_shuffles_itself_with_workers",
    "py_dataset_workers",
    "seeded_shuffles_that_one_rank_has_looked_into",
    "shards_of_shards",
    "tf_data_interleaved",
    "tf_data_short_buffer",
    "the_chief_says_that_ranks_saw_the_same_rows",
)


@pytest.fixture(scope="module")
def launches():
    return {}


@pytest.mark.parametrize("case", [case for case in spmd.names(TARGET) if case not in SLOW])
def test_case(launches, request, case):
    if case not in launches:
        only = spmd.batch_with(case, spmd.selected(request))
        launches |= dict.fromkeys(only, spmd.run(TARGET, 2, only=only, timeout=570))
    launches[case].check(case)
