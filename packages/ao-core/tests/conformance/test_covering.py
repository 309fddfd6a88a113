"""`covering`: few cases in which all pairs meet."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from ao_core.testing.base import covering


def pairs(case):
    return set(combinations(enumerate(case), 2))


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=40))
def test_every_pair_meets_that_met_before(cases):
    kept = covering(cases, lambda case: case)
    assert set(kept) <= set(cases)
    assert set().union(*map(pairs, kept)) == set().union(*map(pairs, cases))


def test_a_product_of_a_long_axis_and_two_short_ones_is_halved():
    cases = list(product("ab", range(20), "xy"))
    kept = covering(cases, lambda case: case)
    assert 40 <= len(kept) <= 44
    assert kept == sorted(kept, key=cases.index)
