"""The staleness of updates, as logs that callbacks can read: the same names in each epoch."""

import pytest

from kdist.parameter_server.staleness import staleness_logs


@pytest.mark.parametrize(
    ("counts", "num_workers", "expected"),
    [
        ({0: 9}, 1, {"0": 9, "1": 0, "2_and_more": 0}),
        ({0: 1, 2: 2, 3: 3, 4: 4, 90: 5}, 2, {"0": 1, "1": 0, "2_to_3": 5, "4_and_more": 9}),
        ({1: 7, 5: 1, 8: 1}, 3, {"0": 0, "1": 7, "2_to_3": 0, "4_to_7": 1, "8_and_more": 1}),
    ],
)
def test_each_update_is_in_one_bin(counts, num_workers, expected):
    logs = staleness_logs(counts, num_workers)
    total = sum(counts.values())
    assert logs.pop("staleness_mean") == pytest.approx(sum(each * n for each, n in counts.items()) / total)
    assert logs.pop("staleness_max") == max(counts)
    assert logs == {f"staleness_{name}": number for name, number in expected.items()}
    assert all(isinstance(value, float) for value in logs.values())
