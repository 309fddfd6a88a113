"""Experts and convolutions are pruned by their own inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_sparsity import NofM, PruneReport, Unstructured, prune_sparsegpt, prune_wanda
from ao_sparsity.prune.sparsegpt import sparsegpt


class Experts(nn.Module):
    """The first six rows of a batch are for expert 0, the others for expert 1, and none for expert 2."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 8))

    def forward(self, x):
        return torch.cat([F.linear(x[:6], self.weight[0]), F.linear(x[6:], self.weight[1])])


def _masks(weight, rows, pattern):
    """Wanda's for one matrix."""
    scores = weight.detach().double().abs() * rows.double().norm(dim=0)
    gone = round(pattern.sparsity * weight.shape[1])
    return scores >= scores.kthvalue(gone + 1, dim=1, keepdim=True).values


def test_each_expert_has_its_rows_and_few_share_all():
    model, data = Experts(), [torch.randn(16, 8), torch.randn(14, 8)]
    mine, other = torch.cat([x[:6] for x in data]), torch.cat([x[6:] for x in data])
    everything = torch.cat([mine, other])
    for expert, rows in enumerate((mine, other, everything)):
        weight = model.weight[expert].detach()
        pattern = Unstructured(0.5)
        found = prune_wanda(model, data, pattern)
        assert torch.equal(found.masks["weight"][expert], _masks(weight, rows, pattern))
        found = prune_sparsegpt(model, data, NofM(2, 4))
        hessian = (rows.t() @ rows).double()
        new, mask = sparsegpt(weight, hessian, NofM(2, 4))
        torch.testing.assert_close(found.weights["weight"][expert], new, rtol=1e-3, atol=1e-4)
        assert torch.equal(found.masks["weight"][expert], mask)
        (record,) = found.report.records
        assert record.rows == 30
        assert record.note.startswith("1 of 3 experts saw fewer rows than they have columns, 8")
        assert record.note in str(found)
        assert PruneReport.from_json(found.report.to_json()) == found.report


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_are_pruned_by_unfolded_inputs(groups):
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
    data = [torch.randn(2, 4, 5, 5), torch.randn(1, 4, 7, 4)]
    columns = 4 // groups * 9
    rows = [F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, groups, columns) for x in data]
    rows = torch.cat(rows)
    weight = layer.weight.detach().reshape(groups, 6 // groups, columns)
    wanda = prune_wanda(layer, data, Unstructured(0.5)).masks["weight"]
    obs = prune_sparsegpt(layer, data, NofM(2, 4))
    assert wanda.shape == obs.masks["weight"].shape == layer.weight.shape
    for number in range(groups):
        mine = slice(number * 6 // groups, (number + 1) * 6 // groups)
        expected = _masks(weight[number], rows[:, number], Unstructured(0.5))
        assert torch.equal(wanda[mine].flatten(1), expected)
        x = rows[:, number]
        new, mask = sparsegpt(weight[number], (x.t() @ x).double(), NofM(2, 4))
        assert torch.equal(obs.masks["weight"][mine].flatten(1), mask)
        close = {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(obs.weights["weight"][mine].flatten(1), new, **close)


class Conv1D(nn.Module):
    """The layer of transformers' GPT-2: a weight (in, out), which is multiplied as it is."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = linear.bias

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


@pytest.mark.parametrize("columns", [9, 5])
@pytest.mark.parametrize("method", [prune_wanda, prune_sparsegpt])
def test_weights_that_are_stored_transposed(method, columns):
    layers = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, columns))
    turned = nn.Sequential(Conv1D(layers[0]), nn.ReLU(), Conv1D(layers[2]))
    data = [torch.randn(20, 8), torch.randn(3, 8)]
    mine, expected = (method(each, data, Unstructured(0.5)) for each in (turned, layers))
    for name in ("0.weight", "2.weight"):
        assert torch.equal(mine.masks[name], expected.masks[name].t())
        if expected.weights:
            torch.testing.assert_close(mine.weights[name], expected.weights[name].t())
    assert [r.rows for r in mine.report.with_status("pruned")] == [23, 23]
