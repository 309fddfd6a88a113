"""Magnitude, Wanda and SparseGPT: against direct formulas in float64, and beside each other."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ao_core import FqnToConfig
from ao_core.ext.calibration import answer
from ao_sparsity import (
    NofM,
    PruneReport,
    Rows,
    Unstructured,
    apply_masks,
    prune_magnitude,
    prune_sparsegpt,
    prune_wanda,
)
from ao_sparsity.prune.sparsegpt import sparsegpt


def test_magnitude_by_layer_and_by_model(model, same):
    unchanged = same(model)
    layer = prune_magnitude(model, Unstructured(0.3))
    whole = prune_magnitude(model, Unstructured(0.3), scope="model")
    unchanged()
    sizes = {"0.weight": 52 * 37, "2.weight": 37 * 19}
    assert {r.fqn: r.removed for r in layer.report.with_status("pruned")} == {
        name: round(0.3 * size) for name, size in sizes.items()
    }
    assert whole.report.removed == round(0.3 * sum(sizes.values()))
    weights = dict(model.named_parameters())
    cut = torch.cat([weights[n].abs()[~whole.masks[n]] for n in sizes]).max()
    kept = torch.cat([weights[n].abs()[whole.masks[n]] for n in sizes]).min()
    assert cut <= kept


@pytest.mark.parametrize("pattern", [Unstructured(0.4), NofM(2, 4), Rows(0.25)])
def test_wanda_is_its_formula(model, data, pattern, same):
    unchanged = same(model)
    scope = "layer" if isinstance(pattern, Rows) else "row"
    found = prune_wanda(model, data, pattern, scope=scope)
    unchanged()
    x = torch.cat(data)
    inputs = {"0.weight": x, "2.weight": model[1](model[0](x))}
    for name, rows in inputs.items():
        weight = model.get_parameter(name).detach()
        scores = weight.double().abs() * rows.double().norm(dim=0)
        if isinstance(pattern, Unstructured):
            expected = torch.ones_like(weight, dtype=torch.bool)
            gone = scores.argsort(dim=1)[:, : round(0.4 * weight.shape[1])]
            expected.scatter_(1, gone, False)
        elif isinstance(pattern, NofM):
            padded = nn.functional.pad(scores, (0, -weight.shape[1] % 4), value=-1.0)
            best = padded.unflatten(1, (-1, 4)).argsort(dim=-1, descending=True)[..., :2]
            kept = torch.zeros_like(padded.unflatten(1, (-1, 4)), dtype=torch.bool)
            expected = kept.scatter_(-1, best, True).flatten(1)[:, : weight.shape[1]]
        else:
            gone = scores.norm(dim=1).argsort()[: round(0.25 * weight.shape[0])]
            expected = torch.ones_like(weight, dtype=torch.bool)
            expected[gone] = False
        assert torch.equal(found.masks[name], expected), name


def brain_surgeon(weight, hessian, pattern, damping, block):
    """SparseGPT as its formulas are, with an explicit inverse for each column; nothing is delayed."""
    w = weight.clone()
    rows, columns = w.shape
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(columns).double()
    inverses = [torch.linalg.inv(damped[i:, i:]) for i in range(columns)]
    first = torch.stack([inverse[0, 0] for inverse in inverses])
    kept = torch.ones_like(w, dtype=torch.bool)
    width = pattern.m if isinstance(pattern, NofM) else block
    for i in range(columns):
        if i % width == 0:
            stop = min(i + width, columns)
            scores = w[:, i:stop].square() / first[i:stop]
            if isinstance(pattern, NofM):
                gone = scores.argsort(dim=1)[:, : max(stop - i - pattern.n, 0)]
                kept[:, i:stop] = kept[:, i:stop].scatter(1, gone, False)
            else:
                count = round(pattern.sparsity * rows * stop) - round(pattern.sparsity * rows * i)
                gone = scores.flatten().argsort()[:count]
                kept[:, i:stop] = torch.ones(rows * (stop - i)).scatter(0, gone, 0.0).view(rows, -1)
        gone = ~kept[:, i]
        w[gone, i:] -= (w[gone, i] / inverses[i][0, 0])[:, None] * inverses[i][0]
    return w.masked_fill(~kept, 0), kept


@settings(max_examples=20)
@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.sampled_from([Unstructured(0.0), Unstructured(0.45), Unstructured(1.0), NofM(2, 4), NofM(1, 3)]),
    st.sampled_from([12, 24, 120]),
    st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_sparsegpt_is_the_unblocked_brain_surgeon(n, k, pattern, block, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator, dtype=torch.float64)
    x = torch.randn(2 * k, k, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(k, k, generator=generator, dtype=torch.float64)
    before = weight.clone()
    new, kept = sparsegpt(weight, x.T @ x, pattern, 0.01, block)
    expected, mask = brain_surgeon(weight, x.T @ x, pattern, 0.01, block)
    assert torch.equal(weight, before)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, expected, rtol=1e-7, atol=1e-9)
    if isinstance(pattern, Unstructured):
        assert int((~kept).sum()) == round(pattern.sparsity * n * k)


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NofM(2, 4), NofM(4, 8)])
def test_each_method_beats_the_one_before(data, pattern):
    model = nn.Sequential(nn.Linear(52, 37))
    dense = torch.cat([answer(model, x) for x in data])
    errors = []
    for found in (
        prune_magnitude(model, pattern),
        prune_wanda(model, data, pattern),
        prune_sparsegpt(model, data, pattern),
    ):
        pruned = copy.deepcopy(model)
        apply_masks(pruned, found)
        out = torch.cat([answer(pruned, x) for x in data])
        errors.append(float((out - dense).norm() / dense.norm()))
    magnitude, wanda, sparse = errors
    assert 0.01 < sparse < 0.9 * wanda < 0.9 * magnitude


def test_later_layers_see_pruned_earlier_ones(model, data, same):
    unchanged = same(model)
    found = prune_sparsegpt(model, data, NofM(2, 4))
    unchanged()
    half = copy.deepcopy(model)
    with torch.no_grad():
        half[0].weight.copy_(found.weights["0.weight"])
    x = torch.cat([half[1](half[0](batch)) for batch in data]).detach()
    dense = torch.cat([model[1](model[0](batch)) for batch in data]).detach()
    weight = model[2].weight.detach()
    hessians = [(each.T @ each).double() for each in (x, dense)]
    (new, mask), (other, _) = (sparsegpt(weight, h, NofM(2, 4)) for h in hessians)
    torch.testing.assert_close(found.weights["2.weight"], new, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.masks["2.weight"], mask)
    assert (new - other).norm() > 0.01 * new.norm()


class Attention(nn.Module):
    """Three projections of one input; the last is called twice, and one never."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.never = (nn.Linear(12, 12) for _ in range(4))
        self.out = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x, again=False):
        x = self.q(x) * self.k(x) + self.v(x)
        x = self.v(x) if again else x
        return self.out(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("method", [prune_wanda, prune_sparsegpt])
def test_inputs_are_seen_wherever_the_model_multiplies(method):
    model = Attention()
    data = [(torch.randn(4, 5, 12),), {"x": torch.randn(2, 5, 12), "again": True}]
    found = method(model, data, NofM(2, 4))
    assert {r.fqn: r.status for r in found.report.records if len(r.shape) > 1} == {
        "q.weight": "pruned",
        "k.weight": "pruned",
        "v.weight": "pruned",
        "never.weight": "skipped",
        "out.in_proj_weight": "pruned",
        "out.out_proj.weight": "pruned",
    }
    (skipped,) = found.report.with_status("skipped")
    assert skipped.reason == "the calibration data never reached it"
    for mask in found.masks.values():
        assert bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())


def test_inputs_of_all_uses_count():
    """The Hessian of a layer that is called again has the rows of both calls."""
    model, x = Attention(), torch.randn(3, 5, 12)
    seen = []
    handle = model.v.register_forward_hook(lambda _m, args, _out: seen.append(args[0].detach()))
    answer(model, {"x": x, "again": True})
    handle.remove()
    rows = torch.cat([each.reshape(-1, 12) for each in seen])
    scores = model.v.weight.detach().double().abs() * rows.double().norm(dim=0)
    found = prune_wanda(model, [{"x": x, "again": True}], Unstructured(0.5))
    expected = scores >= scores.kthvalue(7, dim=1, keepdim=True).values
    assert torch.equal(found.masks["v.weight"], expected)


def test_a_pattern_for_each_name(model, data):
    patterns = FqnToConfig({"0": NofM(2, 4), "re:2.*": Unstructured(0.9), "*": None})
    for found in (
        prune_magnitude(model, patterns, scope="layer"),
        prune_wanda(model, data, patterns),
        prune_sparsegpt(model, data, patterns),
    ):
        pruned = {r.fqn: r.pattern for r in found.report.with_status("pruned")}
        assert pruned == {"0.weight": "2:4", "2.weight": "unstructured 0.9"}


def test_half_precision_and_what_is_sparse_already(data):
    model = nn.Sequential(nn.Linear(52, 37)).bfloat16()
    half = [x.bfloat16() for x in data]
    found = prune_sparsegpt(model, half, NofM(2, 4))
    assert found.weights["0.weight"].dtype == torch.bfloat16
    apply_masks(model, found)
    again = [
        prune_magnitude(model, NofM(2, 4)),
        prune_wanda(model, half, NofM(2, 4)),
        prune_sparsegpt(model, half, NofM(2, 4)),
    ]
    before = model[0].weight.detach().clone()
    for each in again:
        values = each.weights.get("0.weight", before)
        assert torch.equal(values.masked_fill(~each.masks["0.weight"], 0), before)


def test_inputs_of_zeros_leave_weights_as_they_are(model):
    found = prune_sparsegpt(model, [torch.zeros(3, 52)], Unstructured(0.5))
    weight = model[0].weight.detach()
    mask = found.masks["0.weight"]
    torch.testing.assert_close(found.weights["0.weight"], weight * mask, rtol=0, atol=0)


def test_report(model, data):
    model.append(nn.Linear(19, 3))
    report = prune_wanda(model, data, NofM(2, 4), lambda module, name: name != "2").report
    text = str(report)
    assert "0.weight 37×52 2:4 962 50.00%" in re.sub(" +", " ", text)
    assert "unchanged (4):" in text
    assert "filter_fn left it out" in text
    assert f"{report.removed:,} of {report.weights:,} weights removed" in text
    assert PruneReport.from_json(report.to_json()) == report
    assert report.to_dict()["sparsity"] == report.sparsity
    assert math.isclose(report.sparsity, report.removed / (37 * 52 + 19 * 3))


class Layer(nn.Module):
    """A block of a residual stream, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(12, 20), nn.Linear(20, 12), 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("pattern", [NofM(2, 4), Unstructured(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsegpt_is_a_run_of_the_whole_model_for_each_layer(pattern, dtype):
    """Bit for bit, however the layers are reached."""
    model, data = Deep(3).to(dtype), [torch.randn(9, 12).to(dtype) for _ in range(3)]
    found = prune_sparsegpt(model, data, pattern)
    plain = copy.deepcopy(model)
    for name in [f"layers.{n}.{each}" for n in range(3) for each in ("up", "down")]:
        layer, hessian = plain.get_submodule(name), torch.zeros(())
        seen = []
        handle = layer.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            for batch in data:
                plain(batch)
            handle.remove()
            for rows in seen:
                hessian = hessian + (rows.float().t() @ rows.float()).double()
            new, mask = sparsegpt(layer.weight.detach(), hessian, pattern)
            layer.weight.copy_(new)
        assert torch.equal(found.weights[f"{name}.weight"], new), name
        assert torch.equal(found.masks[f"{name}.weight"], mask), name


def test_cost_of_sparsegpt_is_linear_in_the_number_of_blocks():
    for depth in (4, 8):
        model = Deep(depth)
        prune_sparsegpt(model, [torch.randn(9, 12), torch.randn(3, 12)], NofM(2, 4))
        # for each batch: once to find the order, for each of two layers, and for the outputs
        assert {layer.calls for layer in model.layers[:-1]} == {2 * 4}
        assert model.layers[-1].calls == 2 * 3


def test_progress(model, data):
    calls = []
    prune_sparsegpt(model, data, NofM(2, 4), progress=lambda *args: calls.append(args))
    assert calls == [(0, 2, "0.weight"), (1, 2, "2.weight"), (2, 2, "")]
    calls.clear()
    prune_wanda(model, data[:2], NofM(2, 4), progress=lambda *args: calls.append(args))
    assert calls == [(0, 2, "batch 1"), (1, 2, "batch 2"), (2, 2, "")]
