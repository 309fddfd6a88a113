"""Axes against the numbers of indices that torch itself moves about."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.graph.axes import (
    Axis,
    atoms,
    coordinates,
    factor,
    fix,
    join,
    product,
    segment,
    unify,
)

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def index_of(axis: Axis) -> dict[Axis, list[int]]:
    return {atom: index.tolist() for atom, index in coordinates(axis)}


@given(SIZES)
def test_the_factors_of_an_axis_are_those_of_a_view(sizes: list[int]) -> None:
    total = int(torch.tensor(sizes).prod())
    axis = Axis(total)
    parts = factor(axis, sizes)
    assert parts is not None
    assert [part.size for part in parts] == sizes
    found = index_of(axis)
    for dim, part in enumerate(parts):
        if part.size > 1:
            shape = [-1 if i == dim else 1 for i in range(len(sizes))]
            expected = torch.arange(part.size).view(shape).expand(sizes).flatten()
            assert found[atoms(part)[0]] == expected.tolist()


@given(SIZES, st.data())
def test_a_view_of_a_view_divides_what_is_there(sizes: list[int], data: st.DataObject) -> None:
    """Split by some sizes and then by others: both are right, or nothing of the axis can go."""
    total = int(torch.tensor(sizes).prod())
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    first = data.draw(st.sampled_from(divisors))
    axis = Axis(total)
    parts = factor(axis, sizes)
    again = factor(axis, [first, total // first])
    assert parts is not None
    if again is None:
        ends = {int(torch.tensor(sizes[i:]).prod()) for i in range(len(sizes) + 1)}
        assert total // first not in ends
        return
    outer = {atom for atom in atoms(again[0]) if atom.size > 1}
    inner = {atom for atom in atoms(again[1]) if atom.size > 1}
    assert not outer & inner
    for atom, index in coordinates(axis):
        grid = torch.tensor(index.tolist()).view(first, total // first)
        # what belongs to the outer factor is the same in a row, what belongs to the inner in a column
        assert (grid == (grid[:, :1] if atom in outer else grid[:1])).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_segments_divide_where_they_end(sizes: list[int], data: st.DataObject) -> None:
    axis = Axis(sum(sizes))
    segment(axis, sizes)
    start = data.draw(st.integers(0, sum(sizes)))
    found = segment(axis, [start, sum(sizes) - start])
    assert found is not None
    places = {}
    for atom, index in coordinates(axis):
        here = torch.tensor(index.tolist()) >= 0
        places[atom] = here.nonzero().flatten().tolist()
    for part, span in zip(found, (range(start), range(start, sum(sizes))), strict=True):
        inside = sorted(i for atom in atoms(part) if atom.size for i in places[atom])
        assert inside == list(span)


def test_fused_queries_keys_and_values_share_heads_and_features() -> None:
    rows = Axis(3 * 4 * 5)
    parts = factor(rows, [3, 4, 5])
    assert parts is not None
    found = segment(rows, [20, 20, 20])
    assert found is not None
    assert [[a.size for a in atoms(part) if a.size > 1] for part in found] == [[4, 5]] * 3
    assert atoms(found[0])[-2:] == atoms(found[2])[-2:] == [parts[1], parts[2]]


def test_a_sum_divides_into_heads() -> None:
    q, k = Axis(12), Axis(6)
    heads = factor(join([q, k]), [9, 2])
    assert heads is not None
    assert [a.size for a in atoms(heads[0])] == [6, 3]
    assert atoms(q)[1] is atoms(k)[1] is atoms(heads[1])[0]  # the width of a head is the same


def test_what_is_fixed_stays_fixed_where_it_is_divided_or_unified() -> None:
    a, b = Axis(6, fixed="why"), Axis(6)
    factor(b, [2, 3])
    unify(a, b)
    assert [atom.fixed for atom in atoms(b)] == ["why", "why"]
    c = Axis(6, inexact="mixed")
    parts = segment(c, [2, 4])
    assert parts is not None
    assert [(p.fixed, p.inexact) for p in parts] == [(None, "mixed")] * 2


def test_divisions_that_cannot_be_the_same_fix_both() -> None:
    a, b = Axis(30), Axis(30)
    factor(a, [5, 6])
    segment(b, [7, 23])
    unify(a, b)
    for atom in (*atoms(a), *atoms(b)):
        assert atom.fixed is not None
        assert "divide its 30 indices" in atom.fixed


def test_other_sizes_fix_both() -> None:
    a, b = Axis(4), Axis(5)
    unify(a, b)
    assert a.fixed
    assert b.fixed
    fix(a, "another reason")
    assert a.fixed != "another reason"  # the first stays


def test_a_product_of_one_is_that_one() -> None:
    axis = Axis(4)
    assert product([Axis(1), axis]) is axis
    assert join([Axis(0), axis]) is axis
    assert factor(axis, [3, 2]) is None
    assert segment(axis, [3, 2]) is None
