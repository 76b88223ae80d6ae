"""What is computed from known means, as from gradients: whether it is a weighted sum, and it computed again."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.graphs.recomputed import Recomputed, RowReduction
from kdist.state.rows.reduction_frontier import ReductionFrontier, is_computed_of, is_weighted_sum

SUMS = {
    "one": lambda a, b, x: a,
    "a sum": lambda a, b, x: a - 2 * b,
    "a quotient": lambda a, b, x: a / 3,
    "beside a constant": lambda a, b, x: a + 1,
    "a constant": lambda a, b, x: tf.ones(3),
    "by a norm": lambda a, b, x: a / tf.norm(b),
    "a product": lambda a, b, x: a * b,
    "clipped": lambda a, b, x: tf.clip_by_norm(a, 1.0),
    "with rows": lambda a, b, x: a + x[0],
}


def traced(compute, check):
    """Calls `check` with what is computed from two known tensors and from rows, while that is traced."""
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 3))])
    def run(x):
        known = [tf.reduce_mean(x, 0), tf.reduce_mean(x**2, 0)]

        def depends_on_rows(tensor):
            return any(each.name == x.name for each in [tensor, *computed_of([tensor])])

        value = compute(*known, x)
        found.append(check(value, {tensor_key(each): RowReduction(each, "mean") for each in known}, depends_on_rows))
        return value

    run.get_concrete_function()
    return found[0]


@pytest.mark.parametrize(
    ("name", "expected", "without_others"),
    [
        ("one", True, True),
        ("a sum", True, True),
        ("a quotient", True, True),
        ("beside a constant", True, False),
        ("a constant", True, True),
        ("by a norm", False, False),
        ("a product", False, False),
        ("clipped", False, False),
        ("with rows", False, False),
    ],
)
def test_weighted_sums(name, expected, without_others):
    def check(value, known, depends_on_rows):
        def is_known(tensor):
            return tensor_key(tensor) in known

        return [is_weighted_sum(value, is_known, depends_on_rows, may_add_others=each) for each in (True, False)]

    assert traced(SUMS[name], check) == [expected, without_others]


def test_what_is_computed_of_known_tensors():
    found = {
        name: traced(compute, lambda value, known, _: is_computed_of(value, known)) for name, compute in SUMS.items()
    }
    assert [name for name, is_found in found.items() if not is_found] == ["a constant"]


@pytest.mark.parametrize("name", ["a sum", "by a norm", "clipped"])
def test_it_is_computed_again_from_the_known_tensors_alone(name):
    def check(value, known, depends_on_rows):
        cut = ReductionFrontier([value], known, depends_on_rows)
        assert {each.kind for each in cut.listed} == {"mean"}
        recomputed = Recomputed(cut.is_changed)
        recomputed.values |= {each.tensor.name: 2 * tf.ones(3) for each in cut.listed}
        return recomputed(value)

    @tf.function(autograph=False)
    def run(x):
        known = [tf.reduce_mean(x, 0), tf.reduce_mean(x**2, 0)]

        def depends_on_rows(tensor):
            return any(each.name == x.name for each in [tensor, *computed_of([tensor])])

        return check(
            SUMS[name](*known, x), {tensor_key(each): RowReduction(each, "mean") for each in known}, depends_on_rows
        )

    twos = 2 * tf.ones(3)
    np.testing.assert_allclose(run(tf.random.normal((6, 3))), SUMS[name](twos, twos, None), rtol=1e-6)


@pytest.mark.parametrize("name", ["a constant", "with rows"])
def test_what_is_of_no_known_tensor_or_of_more_is_not(name):
    with pytest.raises(LookupError):
        traced(SUMS[name], lambda value, known, depends_on_rows: ReductionFrontier([value], known, depends_on_rows))
