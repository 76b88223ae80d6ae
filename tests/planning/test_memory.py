"""The arithmetic of a plan: what ranks hold, what fits, and what to change."""

import dataclasses
import json

import pytest

from kdist.errors import KDistError
from kdist.planning.advice import changes
from kdist.planning.memory import Sizes, parse_bytes, readable, shares
from kdist.planning.plan import make_plan

MB = 10**6
ADAM = Sizes(
    weights=100 * MB, trained=100 * MB, slots=200 * MB, row=MB, batch_size=64, process=500 * MB, largest=60 * MB
)


def by_rank(sizes, ranks):
    return {(each.strategy, each.rank): each for each in shares(sizes, ranks)}


def test_one_process_sends_nothing():
    (alone,) = shares(ADAM, 1)
    assert alone.messages == 0
    assert alone.peak == (500 + 100 + 100 + 200 + 64) * MB


def test_slots_are_split_over_ranks():
    four = by_rank(ADAM, 4)
    assert four["all-reduce", "each"].slots == 200 * MB
    assert four['shard="optimizer"', "each"].slots == 50 * MB
    assert four['shard="optimizer"', "each"].gradients == 25 * MB
    assert four['shard="optimizer"', "each"].messages == 100 * MB  # two of the largest would be more than all
    assert four["parameter server", "server"].slots == 200 * MB
    assert four["parameter server", "worker"].slots == 0


@pytest.mark.parametrize(("largest", "messages"), [(1, 16), (20, 40), (60, 100)])
def test_gradients_of_two_messages_are_whole_beside_sums_in_parts(largest, messages):
    share = by_rank(dataclasses.replace(ADAM, largest=largest * MB), 2)['shard="optimizer"', "each"]
    assert (share.gradients, share.messages) == (50 * MB, messages * MB)


def test_whole_weights_have_one_owner():
    muon = dataclasses.replace(ADAM, is_elementwise=False)
    assert by_rank(muon, 4)['shard="optimizer"', "each"].slots == 120 * MB


def test_servers_need_three_ranks():
    assert all(strategy != "parameter server" for strategy, _ in by_rank(ADAM, 2))


def test_each_rank_gathers_the_rows_of_all():
    gathering = dataclasses.replace(ADAM, gathered=1000, tables=50 * MB)
    for ranks in (1, 2, 8):
        with_gathers, without = by_rank(gathering, ranks), by_rank(dataclasses.replace(gathering, gathered=0), ranks)
        for key, share in with_gathers.items():
            added = 1000 * 64 * ranks if ranks > 1 and key[0] != "parameter server" else 0
            assert share.messages - without[key].messages == share.peak - without[key].peak == added


@pytest.mark.parametrize(("ranks", "number", "rows"), [(2, None, 64), (2, 1, 32), (3, 4, 86), (8, 4, 32), (1, 4, 256)])
def test_rows_follow_the_batches_of_a_step(ranks, number, rows):
    sizes = dataclasses.replace(ADAM, batches_per_step=number)
    assert sizes.rows(ranks) == rows
    assert by_rank(sizes, ranks)["all-reduce", "each"].activations == rows * MB


@pytest.mark.parametrize(
    ("memory", "change"),
    [
        ("2GB", None),
        ("1050MB", 'shard="optimizer"'),  # not half of the batch, which would do
        ("910MB", 'shard="optimizer", RematScope'),
        ("860MB", 'shard="optimizer", RematScope, mixed_bfloat16, batch_size=32'),
        ("820MB", 'shard="optimizer", -np'),
        ("600MB", "nothing here is enough"),
    ],
)
def test_the_least_change(memory, change):
    plan = make_plan(ADAM, 2, memory)
    found = plan.advice("all-reduce")
    assert (found is None) if change is None else found.startswith(change)


@pytest.mark.parametrize(
    ("memory", "change"),
    [
        ("1GB", "RematScope"),  # of 64 rows, which take 1 GB of 1.5
        ("800MB", "RematScope, mixed_bfloat16"),
        ("640MB", "RematScope, mixed_bfloat16, batch_size=32"),
        ("502MB", "nothing here is enough"),
    ],
)
def test_the_batch_is_kept_where_one_other_change_does(memory, change):
    rows = dataclasses.replace(ADAM, weights=0, trained=0, slots=0, row=1000 * MB // 64)
    assert make_plan(rows, 1, memory).advice("all-reduce").startswith(change)


def test_half_precision_comes_alone_where_it_does():
    rows = dataclasses.replace(ADAM, weights=0, trained=0, slots=0, row=1000 * MB // 64)
    texts = [text for text, *_ in changes(rows, 2, "all-reduce")]
    assert texts[:4] == ['shard="optimizer"', "RematScope", "mixed_bfloat16", "batch_size=32"]
    assert len(texts) == len(set(texts))


def test_what_is_refused_is_not_proposed():
    clips_by_hand = dataclasses.replace(ADAM, takes_parts=False, tables=50 * MB)
    assert 'shard="optimizer"' not in str(make_plan(clips_by_hand, 2, "700MB"))
    plan = make_plan(dataclasses.replace(clips_by_hand, tables=0), 4, "560MB")
    assert [each.strategy for each in plan.shares] == ["all-reduce"] + 3 * ["parameter server"]
    assert plan.advice("all-reduce").startswith("nothing here is enough")


def test_the_table_is_narrow_and_the_dict_is_json():
    plan = make_plan(ADAM, 4, "300MB")
    assert max(map(len, str(plan).splitlines())) <= 120
    assert json.loads(json.dumps(plan.to_dict()))["fits"] is False
    assert not plan.fits_under("all-reduce")


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("800mb", 800 * MB)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24XB", "GB", "-1GB", "0", "infGB", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(KDistError, match="Received: .* Expected .* Fix: "):
        parse_bytes(text)


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5])
def test_ranks_are_checked(ranks):
    with pytest.raises(KDistError, match="ranks"):
        make_plan(ADAM, ranks, None)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1250, "1.25 KB"), (999_999, "1.00 MB")])
def test_sizes_are_shown(size, text):
    assert readable(size) == text


def test_a_process_that_does_not_fit_needs_more_memory_not_a_smaller_model():
    found = make_plan(dataclasses.replace(ADAM, process=1000 * MB), 2, "999MB").advice("all-reduce")
    assert found == "more memory: Python and TensorFlow alone take 1.00 GB on each rank"


def test_a_script_that_only_predicts_is_planned_with_tables():
    sizes = dataclasses.replace(ADAM, slots=0, trained=0, tables=50 * MB)
    assert all(each.slots == 0 for each in shares(sizes, 2))
