"""Masks of every pattern and scope: exact counts, whole units, and the greatest scores stay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_core import FqnToConfig
from ao_core.ext import ConfigError
from ao_sparsity import prune_magnitude
from ao_sparsity.masks import greatest_mask
from ao_sparsity.prune import Blocks, Columns, Heads, NofM, Rows, Unstructured

sizes = st.integers(1, 19)
shares = st.floats(0, 1)
norms = st.sampled_from([1.0, 2.0, 3.0, math.inf])


def scores_of(n: int, k: int, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * n + k)
    found = torch.rand(n, k, generator=generator)
    return (found * 4).round() if ties else found


@given(st.integers(1, 60), st.data(), st.booleans())
def test_exactly_the_greatest_stay(count, data, ties):
    kept = data.draw(st.integers(0, count))
    scores = scores_of(1, count, ties)[0]
    expected = sorted(range(count), key=lambda i: (-float(scores[i]), i))[:kept]
    assert sorted(expected) == greatest_mask(scores, kept).nonzero().flatten().tolist()


def test_nan_counts_as_the_greatest():
    scores = torch.tensor([1.0, float("nan"), 3.0, float("-inf")])
    assert greatest_mask(scores, 1).tolist() == [False, True, False, False]
    assert greatest_mask(scores, 3).tolist() == [True, True, True, False]


@given(sizes, sizes, shares, st.booleans())
def test_unstructured_counts(n, k, share, ties):
    scores = scores_of(n, k, ties)
    (layer,) = Unstructured(share).masks([scores], "layer")
    (row,) = Unstructured(share).masks([scores], "row")
    assert int((~layer).sum()) == round(share * n * k)
    assert (~row).sum(1).tolist() == [round(share * k)] * n
    if layer.any() and not layer.all():
        assert scores[layer].min() >= scores[~layer].max()


@given(sizes, sizes, sizes, shares, st.sampled_from([Unstructured, Rows]))
def test_one_budget_for_all_matrices(n, k, other, share, kind):
    matrices = [scores_of(n, k), 3 * scores_of(other, k)]
    pattern = kind(share)
    masks = pattern.masks(matrices, "model")
    units = torch.cat([pattern.units(m).flatten() for m in matrices])
    kept = torch.cat(
        [pattern.units(mask.float()).flatten() > 0 for mask in masks]
    )  # a unit stays whole or goes
    assert int((~kept).sum()) == round(share * units.numel())
    if kept.any() and not kept.all():
        assert units[kept].min() >= units[~kept].max()


@given(sizes, sizes, shares, norms)
def test_rows_and_columns_by_their_norms(n, k, share, order):
    scores = scores_of(n, k)
    (rows,) = Rows(share, order=order).masks([scores], "layer")
    (columns,) = Columns(share, order=order).masks([scores.t()], "layer")
    assert torch.equal(rows, columns.t())
    assert torch.equal(rows.all(1), rows.any(1))
    assert int((~rows[:, 0]).sum()) == round(share * n)
    each = torch.stack([row.double().norm(order) for row in scores])
    if rows.any() and not rows.all():
        assert each[rows[:, 0]].min() >= each[~rows[:, 0]].max() * (1 - 1e-12)


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 5), shares)
def test_blocks_go_whole(n, k, height, width, share):
    pattern = Blocks(share, size=(height, width))
    (mask,) = pattern.masks([scores_of(n, k)], "layer")
    corners = mask[::height, ::width]
    assert int((~corners).sum()) == round(share * corners.numel())
    spread = corners.repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :k]
    assert torch.equal(mask, spread)
    (by_row,) = pattern.masks([scores_of(n, k)], "row")
    gone = (~by_row[::height, ::width]).sum(1).tolist()
    assert gone == [round(share * corners.shape[1])] * corners.shape[0]


@given(st.integers(1, 6), st.integers(1, 4), sizes, shares)
def test_heads_go_whole(heads, size, n, share):
    scores = scores_of(n, heads * size)
    (columns,) = Heads(share, heads=heads).masks([scores], "layer")
    (rows,) = Heads(share, heads=heads, dim=-2).masks([scores.t()], "layer")
    assert torch.equal(columns, rows.t())
    assert int((~columns[0, ::size]).sum()) == round(share * heads)
    assert torch.equal(columns, columns[:1, ::size].repeat_interleave(size, 1).expand(n, -1))
    norms = scores.double().unflatten(1, (heads, size)).square().sum((0, 2))
    kept = columns[0, ::size]
    if kept.any() and not kept.all():
        assert norms[kept].min() >= norms[~kept].max()


@given(st.integers(1, 30), st.integers(1, 8), st.data())
def test_n_of_m_keeps_n_of_every_group(k, m, data):
    n = data.draw(st.integers(0, m))
    (mask,) = NofM(n, m).masks([scores_of(3, k)], "layer")
    for start in range(0, k, m):
        group = mask[:, start : start + m]
        assert group.sum(1).tolist() == [min(n, group.shape[1])] * 3
    assert NofM(n, m).sparsity == 1 - n / m
    assert NofM(m, m).at(NofM(n, m).sparsity) == NofM(n, m)


def test_other_sparsities_of_the_same_pattern():
    assert Blocks(0.1, size=(2, 3)).at(0.5) == Blocks(0.5, size=(2, 3))
    assert NofM(2, 4).at(0.8) == NofM(1, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unstructured(1.5), "sparsity=1.5"),
        (lambda: Rows(-0.1), "sparsity=-0.1"),
        (lambda: Columns(float("nan")), "sparsity=nan"),
        (lambda: NofM(3, 2), "n=3, m=2"),
        (lambda: NofM(2, 256), "1 <= m <= 255"),
        (lambda: NofM(2, 4).at(7.0), "sparsity=7.0"),
        (lambda: Rows(0.5, order=0), "order=0"),
        (lambda: Blocks(0.5, size=(0, 4)), r"size=\(0, 4\)"),
        (lambda: Heads(0.5, heads=0), "heads=0"),
        (lambda: Heads(0.5, heads=2, dim=0), "dim=0"),
        (lambda: NofM(2, 4).masks([torch.ones(4, 4)], "model"), "no budget to"),
        (lambda: Rows(0.5).masks([torch.ones(4, 4)], "row"), "do not lie in rows"),
    ],
)
def test_values_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_convolutions_and_experts_are_matrices():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, 8))

    model = nn.Sequential(nn.Conv2d(4, 6, 3), Experts())
    found = prune_magnitude(model, FqnToConfig({"0": Rows(0.5), "1": NofM(2, 4)}))
    filters = found.masks["0.weight"].flatten(1)
    assert filters.all(1).sum() == 3
    assert (~filters.any(1)).sum() == 3
    assert torch.equal(
        found.masks["1.weight"].unflatten(-1, (2, 4)).sum(-1), torch.full((3, 5, 2), 2)
    )
    rows = prune_magnitude(model, FqnToConfig({"1": Rows(0.4), "*": None}))
    assert int((~rows.masks["1.weight"][..., 0]).sum()) == round(0.4 * 15)


def test_transposed_weights_are_turned():
    conv1d = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    conv1d.weight = nn.Parameter(torch.randn(8, 6))  # (in, out)
    mask = prune_magnitude(conv1d, NofM(2, 4)).masks["weight"]
    assert torch.equal(mask.t().unflatten(-1, (2, 4)).sum(-1), torch.full((6, 2), 2))
