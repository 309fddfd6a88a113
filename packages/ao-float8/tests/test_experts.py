"""3-D weights of experts: rows sorted by expert, ragged, some without any."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import ComputeWeight, quantize_
from ao_core.ext import UnsupportedOp
from ao_core.ext.numerics import sqnr

ENDS = {"ragged": [4, 4, 9, 11], "all": [3, 6, 9, 11], "one": [0, 0, 11, 11], "none": [0, 0, 0, 0]}
ROWS = 11


class _Experts(nn.Module):
    """Four experts, as (experts, out, in) or (experts, in, out)."""

    def __init__(self, out_first: bool = True) -> None:
        super().__init__()
        shape = (4, 48, 32) if out_first else (4, 32, 48)
        self.weight = nn.Parameter(torch.randn(shape) / 6)
        self.out_first = out_first

    def forward(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        w = self.weight.transpose(-2, -1) if self.out_first else self.weight
        return torch.bmm(x, w) if offs is None else torch._grouped_mm(x, w, offs=offs)


def _offs(name: str) -> Tensor:
    return torch.tensor(ENDS[name], dtype=torch.int32)


def _pair(recipe: str, out_first: bool = True) -> tuple[_Experts, _Experts]:
    dense = _Experts(out_first)
    low = copy.deepcopy(dense)
    quantize_(low, recipe, strict=True)
    assert isinstance(low.weight, ComputeWeight)
    return dense, low


@pytest.mark.parametrize("out_first", [True, False], ids=["out-in", "in-out"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("recipe", ["float8/rowwise", "float8/tensorwise"])
def test_as_expert_by_expert(recipe, ends, out_first, run):
    """Bit for bit what linear layers of the same recipe give for the rows of each."""
    _, low = _pair(recipe, out_first)
    x, grad = torch.randn(ROWS, 32), torch.randn(ROWS, 48)
    out, grad_x, grad_w = run(low, x, grad, _offs(ends))
    start = 0
    for expert, end in enumerate(ENDS[ends]):
        dense = low.weight.memory[expert] if out_first else low.weight.memory[expert].t()
        layer = nn.Linear(32, 48, bias=False)
        layer.weight = nn.Parameter(ComputeWeight(dense.detach().clone(), *low.weight.matmuls))
        wanted = run(layer, x[start:end], grad[start:end])
        mine = grad_w[expert] if out_first else grad_w[expert].t()
        for a, b in zip(wanted, (out[start:end], grad_x[start:end], mine), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
        start = end
    assert not out[start:].any()
    assert not grad_x[start:].any()


def test_accuracy(run):
    dense, low = _pair("float8/rowwise")
    x, grad = torch.randn(ROWS, 32), torch.randn(ROWS, 48)
    for a, b in zip(
        run(dense, x, grad, _offs("all")), run(low, x, grad, _offs("all")), strict=True
    ):
        assert 25 <= float(sqnr(a, b)) <= 45


def test_compiled_is_eager(run):
    _, low = _pair("float8/rowwise")
    compiled = torch.compile(low, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(ROWS, 32), torch.randn(ROWS, 48)
    eager = run(low, x, grad, _offs("ragged"))
    for a, b in zip(eager, run(compiled, x, grad, _offs("ragged")), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()


def test_a_batch_for_each(run):
    _, low = _pair("float8/rowwise")
    x, grad = torch.randn(4, 5, 32), torch.randn(4, 5, 48)
    batched = run(low, x, grad)
    offs = torch.arange(1, 5, dtype=torch.int32) * 5
    flat = run(low, x.reshape(20, 32), grad.reshape(20, 48), offs)
    for a, b in zip(flat, batched, strict=True):
        torch.testing.assert_close(b.reshape(a.shape), a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["select", "unbind"])
def test_one_by_one(how):
    dense, low = _pair("float8/rowwise")
    x = torch.randn(5, 32)
    weights = list(low.weight) if how == "unbind" else [low.weight[i] for i in range(4)]
    out = torch.stack([F.linear(x, w) for w in weights])
    out.sum().backward()
    assert low.weight.grad is not None
    assert low.weight.grad.shape == (4, 48, 32)
    exact = torch.stack([F.linear(x, w) for w in dense.weight])
    assert 25 <= float(sqnr(exact, out)) <= 40


def test_in_bfloat16_and_under_autocast():
    _, low = _pair("float8/rowwise")
    x, offs = torch.randn(ROWS, 32), _offs("all")
    expected = low(x, offs)
    with torch.autocast("cpu", torch.bfloat16):
        out = low(x, offs)
    assert out.dtype == torch.bfloat16
    assert 25 <= float(sqnr(expected, out.float())) <= 60
    out.float().sum().backward()
    assert low.weight.grad is not None
    assert low.weight.grad.dtype == torch.float32
    half = copy.deepcopy(low).bfloat16()
    assert half(x.bfloat16(), offs).dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(low(x, offs), expected)


def test_as_another_operand_they_are_plain():
    """Where the weights are not what is multiplied with, nothing is cast, and gradients arrive."""
    dense, low = _pair("float8/rowwise")
    for experts in (dense, low):
        torch.bmm(experts.weight, torch.ones(4, 32, 3)).square().sum().backward()
        torch._grouped_mm(experts.weight, torch.ones(4, 32, 4)).square().sum().backward()
    assert torch.equal(low.weight.grad, dense.weight.grad)


def test_offs_that_cannot_be():
    _, low = _pair("float8/rowwise")
    with pytest.raises(UnsupportedOp, match="must not decrease"):
        low(torch.randn(ROWS, 32), torch.tensor([4, 3, 9, 11], dtype=torch.int32))
