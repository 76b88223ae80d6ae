"""Index arithmetic: whatever the sizes, each sample once an epoch and as many steps on all ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.data import sharding
from kdist.data.sharding import Plan
from kdist.errors import DataError

shards = st.integers(1, 7)
batches = st.integers(1, 40)
epochs = st.none() | st.integers(1, 12)


def plans(num_shards, **options):
    return [Plan(num_shards=num_shards, shard_id=shard_id, **options) for shard_id in range(num_shards)]


@given(num_rows=st.integers(0, 1000), num_shards=shards)
def test_slices_cover_all_rows_and_differ_by_at_most_one(num_rows, num_shards):
    slices = [sharding.split_rows(num_rows, num_shards, shard_id) for shard_id in range(num_shards)]
    assert [row for start, stop in slices for row in range(start, stop)] == list(range(num_rows))
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 1


@given(num_batches=batches, num_shards=shards, scale_batch=st.booleans(), steps=epochs, number=st.none() | shards)
def test_each_batch_is_taken_once_in_order(num_batches, num_shards, scale_batch, steps, number):
    taken = []
    ranks = plans(
        num_shards, scale_batch=scale_batch, steps_per_epoch=steps, micro_batches=scale_batch and number or None
    )
    for step in range(sharding.num_steps(num_batches, ranks[0])):
        own = [sharding.batches_of_step(step, num_batches, plan) for plan in ranks]
        assert own[0][1], "the first rank always has a batch"
        if scale_batch:
            taken += [batch for first, count in own for batch in range(first, first + count)]
            assert {first for first, count in own if not count} <= {own[0][0]}
            counts = [count for _, count in own]
            assert counts == sorted(counts, reverse=True)
            assert counts[0] - counts[-1] <= 1
        else:
            assert len(set(own)) == 1
            taken.append(own[0][0])
    assert taken == list(range(num_batches))


@given(num_batches=batches, num_shards=shards, other=shards, steps=epochs, number=shards)
def test_steps_of_micro_batches_do_not_depend_on_the_ranks(num_batches, num_shards, other, steps, number):
    plan, another = (Plan(num_shards=n, steps_per_epoch=steps, micro_batches=number) for n in (num_shards, other))
    assert sharding.num_steps(num_batches, plan) == sharding.num_steps(num_batches, another)
    assert [sharding.group(step, plan) for step in range(50)] == [sharding.group(step, another) for step in range(50)]


@given(num_batches=batches, num_shards=shards, steps=st.integers(1, 12))
def test_a_step_never_crosses_the_end_of_an_epoch(num_batches, num_shards, steps):
    plan = Plan(num_shards=num_shards, steps_per_epoch=steps)
    for step in range(sharding.num_steps(num_batches, plan)):
        first, count = sharding.group(step, plan)
        assert first // steps == (first + count - 1) // steps == step // plan.job_steps_per_epoch


@given(
    num_samples=st.integers(1, 200), size=st.integers(1, 20), num_shards=shards, scale_batch=st.booleans(), steps=epochs
)
def test_rows_of_arrays_cover_the_pass(num_samples, size, num_shards, scale_batch, steps):
    ranks = plans(num_shards, scale_batch=scale_batch, steps_per_epoch=steps)
    own = [sharding.rows_of_steps(num_samples, size, plan) for plan in ranks]
    counted = []
    for step in range(sharding.num_steps(-(-num_samples // size), ranks[0])):
        first = own[0][0][step]
        for starts, stops, rows, global_rows in own:
            start, stop = starts[step], stops[step]
            assert stop - start == max(rows[step], 1)
            assert global_rows[step] == sum(each[2][step] for each in own)
            if rows[step]:
                counted += range(start, stop)
            else:
                assert start == first, "a rank without rows takes the step's first"
    assert counted == list(range(num_samples))


def test_full_batches_are_exactly_the_users():
    starts, stops, rows, global_rows = sharding.rows_of_steps(64, 8, Plan(num_shards=4, shard_id=2))
    assert starts.tolist() == [16, 48]
    assert stops.tolist() == [24, 56]
    assert rows.tolist() == [8, 8]
    assert global_rows.tolist() == [32, 32]


@given(num_samples=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
def test_an_order_is_a_permutation_and_a_pure_function(num_samples, seed, epoch):
    order = sharding.epoch_order(num_samples, seed, epoch)
    assert sorted(order) == list(range(num_samples))
    assert (order == sharding.epoch_order(num_samples, seed, epoch)).all()


def test_epochs_and_seeds_give_other_orders():
    orders = {tuple(sharding.epoch_order(20, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(num_samples=st.integers(1, 100), size=st.integers(1, 20), num_shards=shards, steps=epochs)
def test_batchwise_order_stays_within_a_step(num_samples, size, num_shards, steps):
    plan = Plan(num_shards=num_shards, steps_per_epoch=steps)
    order = sharding.batchwise_order(num_samples, size, plan, epoch=1)
    ends = np.cumsum(sharding.rows_of_steps(num_samples, size, plan)[3])
    for part in np.split(np.arange(num_samples), ends[:-1]):
        assert sorted(order[part]) == part.tolist()


def test_batchwise_order_shuffles():
    assert sharding.batchwise_order(50, 25, Plan(), 0).tolist() != list(range(50))


@pytest.mark.parametrize(
    "options", [{"shard_id": 2, "num_shards": 2}, {"shard_id": -1}, {"seed": -1}, {"steps_per_epoch": 0}]
)
def test_impossible_plans_are_refused(options):
    with pytest.raises(DataError, match="Received.*Expected.*Fix"):
        Plan(**options)


def test_no_samples_are_refused():
    with pytest.raises(DataError, match="have no samples"):
        sharding.rows_of_steps(0, 4, Plan())
    with pytest.raises(DataError, match="batch_size=0"):
        sharding.rows_of_steps(4, 0, Plan())
