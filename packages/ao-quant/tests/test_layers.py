"""Layers other than `nn.Linear`: what they compute equals what they compute with the stored values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import QTensor, dequantize_, quantize_


def _everything(module, name):
    return True


def _dense_twin(model):
    twin = copy.deepcopy(model)
    assert dequantize_(twin)
    return twin


# -- embeddings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 77])
def test_embedding(weight_only, width):
    layer = nn.Embedding(19, width, padding_idx=0)
    quantize_(layer, weight_only, _everything)
    assert isinstance(layer.weight, QTensor)
    ids = torch.tensor([[0, 3, 3], [18, 1, 0]])
    values = layer.weight.dequantize()
    assert torch.equal(layer(ids), values[ids])
    assert torch.equal(layer(ids)[0, 0], torch.zeros(width))
    assert layer(torch.empty(0, 4, dtype=torch.long)).shape == (0, 4, width)


def test_embedding_is_kept_unless_named(weight_only):
    model = nn.Sequential(nn.Embedding(19, 32), nn.Linear(32, 8))
    report = quantize_(model, weight_only)
    assert {r.fqn: r.status for r in report}["0.weight"] == "unchanged"
    assert not isinstance(model[0].weight, QTensor)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(weight_only, mode):
    layer = nn.EmbeddingBag(19, 64, mode=mode)
    quantize_(layer, weight_only, _everything)
    assert isinstance(layer.weight, QTensor)
    ids, offsets = torch.tensor([0, 3, 3, 18]), torch.tensor([0, 3])
    torch.testing.assert_close(layer(ids, offsets), _dense_twin(layer)(ids, offsets))


def test_dynamic_recipes_skip_embeddings_and_say_what_would_work(dynamic):
    layer = nn.Embedding(19, 64)
    (record,) = quantize_(layer, dynamic, _everything)
    assert record.status == "skipped"
    assert "it is an embedding" in record.reason
    assert "weight_only' would" in record.reason


# -- convolutions --------------------------------------------------------------------------------

CONVS = {
    "1d": (lambda: nn.Conv1d(6, 8, 3), (2, 6, 11)),
    "1d-strided": (lambda: nn.Conv1d(6, 8, 5, stride=2, padding=2, bias=False), (2, 6, 11)),
    "1d-unbatched": (lambda: nn.Conv1d(6, 8, 3), (6, 11)),
    "2d": (lambda: nn.Conv2d(6, 8, 3), (2, 6, 9, 7)),
    "2d-1x1": (lambda: nn.Conv2d(40, 8, 1), (2, 40, 5, 5)),
    "2d-grouped": (lambda: nn.Conv2d(6, 9, 3, groups=3, padding="same"), (2, 6, 9, 7)),
    "2d-depthwise": (lambda: nn.Conv2d(6, 6, (3, 1), groups=6, dilation=2), (2, 6, 9, 7)),
    "2d-reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (2, 6, 9, 7)),
    "2d-empty": (lambda: nn.Conv2d(6, 8, 3), (0, 6, 9, 7)),
    "3d": (lambda: nn.Conv3d(3, 5, (1, 3, 2), stride=(1, 2, 1), padding=1), (2, 3, 4, 5, 6)),
}


@pytest.mark.parametrize("kind", CONVS)
def test_convolution(weight_only, kind):
    make, shape = CONVS[kind]
    layer = make()
    quantize_(layer, weight_only)
    assert isinstance(layer.weight, QTensor)
    twin, x = _dense_twin(layer), torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), twin(x))
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(x).square().sum().backward()
    twin(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_transposed_convolution_that_is_named(weight_only):
    layer = nn.ConvTranspose2d(6, 8, 3, stride=2)
    quantize_(layer, weight_only, _everything)
    assert isinstance(layer.weight, QTensor)
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(layer(x), _dense_twin(layer)(x))


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_dynamic_recipes_skip_convolutions(dynamic, conv):
    model = nn.Sequential(conv(4, 4, 3), nn.Linear(8, 8))
    report = quantize_(model, dynamic)
    statuses = {record.fqn: record.status for record in report}
    assert (statuses["0.weight"], statuses["1.weight"]) == ("skipped", "changed")
    assert "filters of a convolution" in report.with_status("skipped")[0].reason


# -- attention -----------------------------------------------------------------------------------

ATTENTION = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 24, "vdim": 12},
    {"add_bias_kv": True},
]


def _attention_inputs(layer, kind):
    q = torch.randn(5, 3, 32)
    k, v = torch.randn(7, 3, layer.kdim), torch.randn(7, 3, layer.vdim)
    if kind == "self":
        inputs = (q, q, q)
    elif kind == "cross":
        inputs = (q, k, k)
    else:
        inputs = (q, k, v)
    return tuple(t.transpose(0, 1) for t in inputs) if layer.batch_first else inputs


@pytest.mark.parametrize("options", ATTENTION, ids=str)
@pytest.mark.parametrize("kind", ["self", "cross", "distinct"])
def test_attention(default, options, kind, sqnr_db, act_bits):
    if "kdim" in options and kind != "distinct":
        kind = "distinct"  # key and value differ in width
    layer = nn.MultiheadAttention(32, 4, **options).eval()
    report = quantize_(layer, default)
    projections = 2 if layer._qkv_same_embed_dim else 4
    assert len(report.with_status("changed")) == projections
    assert isinstance(layer.out_proj.weight, QTensor)
    inputs = _attention_inputs(layer, kind)
    # activations are quantized by some recipes; for the others only the order of sums may differ
    bound, twin = {16: 90, 8: 18, 4: 8}[act_bits(default)], _dense_twin(layer)
    for need_weights in (True, False):
        expected, expected_weights = twin(*inputs, need_weights=need_weights)
        for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with context:
                out, weights = layer(*inputs, need_weights=need_weights)
            assert sqnr_db(expected, out) > bound
            assert (weights is None) == (expected_weights is None) == (not need_weights)


@pytest.mark.parametrize("kind", ["self", "cross", "distinct"])
def test_attention_in_bfloat16(recipe, kind, sqnr_db, act_bits):
    layer = nn.MultiheadAttention(128, 4).eval().bfloat16()
    quantize_(layer, recipe)
    q, k, v = torch.randn(3, 5, 2, 128, dtype=torch.bfloat16)
    inputs = {"self": (q, q, q), "cross": (q, k, k), "distinct": (q, k, v)}[kind]
    expected = _dense_twin(layer)(*inputs)[0]
    with torch.no_grad():
        assert sqnr_db(expected, layer(*inputs)[0]) > {16: 30, 8: 18, 4: 8}[act_bits(recipe)]


def test_attention_input_gradient(default, sqnr_db, act_bits):
    layer = nn.MultiheadAttention(32, 4)
    quantize_(layer, default)
    twin = _dense_twin(layer)
    x = torch.randn(5, 3, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    layer(x, x, x)[0].square().sum().backward()
    twin(y, y, y)[0].square().sum().backward()
    assert sqnr_db(y.grad, x.grad) > {16: 90, 8: 15, 4: 5}[act_bits(default)]


def test_encoder_layer_takes_no_fast_path_that_would_misread_codes(default, sqnr_db, act_bits):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    report = quantize_(layer, default)
    assert len(report.with_status("changed")) == 4
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        bound = {16: 90, 8: 25, 4: 15}[act_bits(default)]
        assert sqnr_db(_dense_twin(layer)(x), layer(x)) > bound


# -- fused weights of experts --------------------------------------------------------------------


class Experts(nn.Module):
    """Weights of four experts, (experts, out, in), used in each way that models do."""

    def __init__(self, out=24, inp=40):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, out, inp))

    def forward(self, x, how):
        if how == "bmm":
            return torch.bmm(x, self.w.transpose(1, 2))
        if how == "matmul":
            return x @ self.w.mT
        if how == "einsum":
            return torch.einsum("emk,enk->emn", x, self.w)
        if how == "index":
            return torch.stack([F.linear(x[e], self.w[e]) for e in range(4)])
        if how == "unbind":
            return torch.stack([F.linear(a, w) for a, w in zip(x, self.w.unbind(0), strict=True)])
        return torch.baddbmm(torch.ones(()), x, self.w.transpose(1, 2))


@pytest.mark.parametrize("how", ["bmm", "matmul", "einsum", "index", "unbind", "baddbmm"])
def test_experts(weight_only, how):
    model = Experts()
    (record,) = quantize_(model, weight_only)
    assert record.status == "changed"
    twin = _dense_twin(model)
    x = torch.randn(4, 6, 40, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = model(x, how), twin(y, how)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(model(x, how), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grouped_mm", ["torch._grouped_mm", "F.grouped_mm"])
def test_experts_by_grouped_mm(weight_only, grouped_mm):
    fn = torch._grouped_mm if grouped_mm == "torch._grouped_mm" else F.grouped_mm
    model = Experts(32, 64).bfloat16()
    quantize_(model, weight_only)
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([4, 4, 12, 20], dtype=torch.int32)
    with torch.no_grad():
        out = fn(x, model.w.transpose(1, 2), offs=offsets)
    dense = model.w.dequantize()
    bounds = zip([0, 4, 4, 12], offsets.tolist(), strict=True)
    pieces = [x[a:b] @ dense[e].t() for e, (a, b) in enumerate(bounds)]
    torch.testing.assert_close(out, torch.cat(pieces), rtol=2e-2, atol=2e-1)


def test_dynamic_recipes_skip_experts(dynamic):
    (record,) = quantize_(Experts(), dynamic)
    assert record.status == "skipped"
    assert "3-D weights of experts" in record.reason
