"""Training in other formats than float8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import WHOLE, ComputeWeight, QTensor, Spec, load_model, quantize_, save_model
from ao_core.ext import ConfigError, UnsupportedOp, fake_quantize
from ao_float8 import MXTrainingConfig, stochastic_rounding

INT8, TERNARY = (
    Spec("int8", (1, WHOLE), options=(("scale_rule", "greatest"),)),
    Spec("ternary", (WHOLE, WHOLE), options=(("scale_rule", "absmean"),)),
)


def _int8_layer(k: int = 70, n: int = 33) -> nn.Linear:
    layer = nn.Linear(k, n)
    quantize_(layer, "int8_weight_only_training", strict=True)
    return layer


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class _Rounded(torch.autograd.Function):
    """The straight-through estimator, written once more."""

    @staticmethod
    def forward(ctx, x, spec):
        return fake_quantize(x, spec)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_bitnet_is_the_straight_through_estimator(run):
    layer = nn.Linear(70, 33, bias=False)
    w = layer.weight.detach().clone().requires_grad_()
    quantize_(layer, "bitnet_training")
    x, grad = torch.randn(19, 70), torch.randn(19, 33)
    out, grad_x, grad_w = run(layer, x, grad)
    x = x.requires_grad_()
    expected = F.linear(_Rounded.apply(x, INT8), _Rounded.apply(w, TERNARY))
    expected.backward(grad)
    for actual, wanted in ((out, expected), (grad_x, x.grad), (grad_w, w.grad)):
        torch.testing.assert_close(actual, wanted)
    weight = layer.weight
    assert isinstance(weight, ComputeWeight)
    assert fake_quantize(weight.memory, weight.matmuls.output).unique().numel() == 3


@pytest.mark.parametrize("k", [8, 70, 1000])
def test_bitnet_is_that_of_the_paper(k, run):
    """BitNet b1.58: x to round(127 x / max |x|) a token, the weight to round(w / mean |w|) in -1, 0, 1."""
    layer = nn.Linear(k, 33, bias=False)
    w = layer.weight.detach().clone().requires_grad_()
    quantize_(layer, "bitnet_training")
    x, grad = torch.randn(19, k), torch.randn(19, 33)
    out, grad_x, grad_w = run(layer, x, grad)
    x = x.requires_grad_()
    by, of = 127 / x.detach().abs().amax(-1, keepdim=True), w.detach().abs().mean()
    rounded_x = x + ((x * by).round().clamp(-128, 127) / by - x).detach()
    rounded_w = w + ((w / of).round().clamp(-1, 1) * of - w).detach()
    F.linear(rounded_x, rounded_w).backward(grad)
    expected = F.linear(rounded_x, rounded_w).detach()
    for actual, wanted in ((out, expected), (grad_x, x.grad), (grad_w, w.grad)):
        torch.testing.assert_close(actual, wanted)


def test_int8_weights_have_no_other_copy():
    layer = _int8_layer()
    assert isinstance(layer.weight, QTensor)
    assert layer.weight.requires_grad
    assert layer.weight.stored_bytes == 33 * 70 + 4 * 33


def test_int8_weights_go_on_from_a_checkpoint(tmp_path):
    layer, other, x = _int8_layer(), nn.Linear(70, 33), torch.randn(5, 70)
    save_model(layer, tmp_path / "model")
    load_model(other, tmp_path / "model")
    assert other.weight.requires_grad
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_int8_weights_learn(name):
    x, y = torch.randn(64, 70), torch.randn(64, 33)
    layer, generator = _int8_layer(), _generator()
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr={"SGD": 1.0, "AdamW": 2e-2}[name])
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), y)
        loss.backward()
        with stochastic_rounding(generator):
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(layer.weight, QTensor)
    assert layer.weight.qdata.dtype == torch.int8


def test_small_updates_are_not_lost():
    """A thousand updates of a hundredth of a step move weights by ten steps; to nearest, by none."""
    weight, plain = _int8_layer().weight, nn.Linear(70, 33).weight
    update = 0.01 * weight.scale.mean().item()
    before = weight.dequantize()
    generator = _generator()
    inner = before.abs() < 0.5 * before.abs().amax(1, keepdim=True)
    with torch.no_grad(), stochastic_rounding(generator):
        for _ in range(1000):
            weight.add_(update)
    moved = (weight.dequantize() - before)[inner]
    assert moved.mean().item() == pytest.approx(1000 * update, rel=0.05)
    assert moved.std().item() < 0.5 * 1000 * update
    assert plain.shape == weight.shape


def test_updates_of_zero_change_nothing():
    """The greatest magnitude is a code: rounding again and again makes nothing smaller."""
    weight = _int8_layer().weight
    with torch.no_grad(), stochastic_rounding(_generator()):
        weight.add_(0.0)  # from the scales of quantize_ to those of updates
        before = weight.dequantize()
        for _ in range(20):
            weight.mul_(1.0)
    torch.testing.assert_close(weight.dequantize(), before)


def test_the_user_decides_the_randomness():
    results, state = [], torch.get_rng_state()
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        weight = _int8_layer().weight
        with torch.no_grad(), stochastic_rounding(_generator(seed)):
            weight.add_(1e-3)
        results.append(weight.dequantize())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad(), stochastic_rounding(_generator()):
        weight.add_(1e-3)
    assert torch.equal(torch.rand(1), expected)
    torch.set_rng_state(state)


def test_updates_need_a_generator():
    weight = _int8_layer().weight
    before = weight.dequantize()
    with torch.no_grad(), pytest.raises(UnsupportedOp, match="stochastic_rounding"):
        weight.add_(1.0)
    assert torch.equal(weight.dequantize(), before)
    with torch.no_grad():
        weight.copy_(torch.ones(33, 70))  # a checkpoint, to nearest
    assert torch.equal(weight.dequantize(), torch.full((33, 70), weight.dequantize()[0, 0].item()))


def test_unknown_elements():
    with pytest.raises(ConfigError, match="grad_dtype='e1m2'"):
        MXTrainingConfig(grad_dtype="e1m2")
