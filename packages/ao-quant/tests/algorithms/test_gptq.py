"""GPTQ against its own mathematics: brute force, identities, and what must fail."""

from __future__ import annotations

import itertools

import pytest
import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext.quantizing import grid_of, regridded
from ao_quant.algorithms import hessian
from ao_quant.algorithms.gptq import gptq
from ao_quant.algorithms.hessian import damped_factor, order_of

INT2 = Spec("int2", (1, -1), layout="packed")
INT4 = Spec("uint4", (1, 16), zero_point="int", layout="packed")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hessian_of(columns, rows=200, seed=1):
    """Σ x xᵀ of correlated inputs."""
    x = normal(rows, columns, seed=seed) @ normal(columns, columns, seed=seed + 1)
    return x.t() @ x


def loss(change, hessian):
    return ((change @ hessian) * change).sum(-1)


def rounded(weight, spec, hessian, *, block=64, damping=1e-9, order=None):
    """Codes, the reported error, and the values."""
    q = quantize_tensor(weight.float(), spec)
    grid = grid_of(q)
    order = torch.arange(weight.shape[1]) if order is None else order
    factor, _ = damped_factor(hessian[order][:, order], damping)
    codes, total, _ = gptq(weight[:, order], factor, grid, grid.block_of[:, order], block)
    codes = torch.empty_like(codes).index_copy_(1, order, codes)
    return codes, total, regridded(q, codes).dequantize().double()


def surgeon(weight, spec, hessian):
    """The optimal brain surgeon: after each column the rest minimizes the quadratic form, solved anew."""
    grid = grid_of(quantize_tensor(weight.float(), spec))
    weight, codes = weight.clone(), []
    columns = weight.shape[1]
    for i in range(columns):
        code, value = grid.nearest(weight[:, i], grid.block_of[:, i])
        codes.append(code)
        left = torch.arange(i, columns)
        inverse = torch.linalg.inv(hessian[left][:, left])
        change = (weight[:, i] - value) / inverse[0, 0]
        weight[:, left] -= change[:, None] * inverse[0]
    return torch.stack(codes, 1)


@pytest.mark.parametrize("spec", [INT2, INT4], ids=str)
@pytest.mark.parametrize("block", [1, 3, 64])
def test_it_is_the_optimal_brain_surgeon(spec, block):
    weight, hessian = normal(24, 8), hessian_of(8)
    codes, _, _ = rounded(weight, spec, hessian, block=block)
    assert torch.equal(codes, surgeon(weight, spec, hessian))


def test_a_diagonal_hessian_is_rounding_to_nearest():
    weight = normal(12, 40)
    codes, _, values = rounded(weight, INT4, torch.diag(normal(40).square() + 0.1))
    nearest = quantize_tensor(weight.float(), INT4)
    assert torch.equal(values, nearest.dequantize().double())
    assert torch.equal(regridded(nearest, codes).qdata, nearest.qdata)


def test_weights_on_the_grid_stay():
    weight = quantize_tensor(normal(6, 32).float(), INT4).dequantize().double()
    _, total, values = rounded(weight, INT4, hessian_of(32))
    assert torch.equal(values, weight)
    assert float(total) < 1e-9


@pytest.mark.parametrize("spec", [INT2, INT4], ids=str)
@pytest.mark.parametrize("damping", [1e-9, 0.01, 1.0])
def test_the_errors_add_up_to_the_quadratic_form(spec, damping):
    """Σ ((w - q) / U[i, i])² = tr(Δ H Δᵀ) with the damped H, clipped or not."""
    weight, hessian = normal(20, 48), hessian_of(48)
    grid = grid_of(quantize_tensor(weight.float(), spec))
    factor, _ = damped_factor(hessian, damping)
    codes, total, turns = gptq(weight, factor, grid, grid.block_of)
    decoded = regridded(quantize_tensor(weight.float(), spec), codes).dequantize()
    values = grid.nearest(decoded, grid.block_of)[1].double()
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    torch.testing.assert_close(total, loss(values - weight, damped).sum(), rtol=1e-10, atol=0)
    errors = ((turns - values) / factor.diagonal()).square().sum()
    torch.testing.assert_close(total, errors, rtol=1e-10, atol=0)


def test_between_the_best_codes_and_rounding_to_nearest():
    """Of 4⁵ codes of each row; per row it may be worse than rounding to nearest, over all it is not."""
    weight, hessian = normal(120, 5), hessian_of(5)
    _, _, values = rounded(weight, INT2, hessian)
    q = quantize_tensor(weight.float(), INT2)
    grid = grid_of(q)
    levels = grid.dtype.decode(torch.arange(4, dtype=torch.uint8)).double()
    choices = torch.tensor(list(itertools.product(levels.tolist(), repeat=5)), dtype=torch.float64)
    candidates = (
        choices[None]
        * grid.scale[grid.block_of[:, :1].long()].double()[:, :, None].squeeze(-1)[..., None]
    )
    best = loss(candidates - weight[:, None], hessian).amin(-1)
    found, nearest = loss(values - weight, hessian), loss(q.dequantize().double() - weight, hessian)
    assert bool((best <= found * (1 + 1e-9)).all())
    assert 0.15 < float(found.sum() / nearest.sum()) < 0.75


def with_stale_scales(weight, spec, hessian, block):
    """GPTQ whose groups get scales from the weights before the block that they are in was begun."""
    width, factor = spec.block[-1], damped_factor(hessian, 1e-9)[0]
    new, values = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], block):
        stale = new.clone()
        for i in range(start, min(start + block, weight.shape[1])):
            first = i // width * width
            group = quantize_tensor(stale[:, first : first + width].float(), spec)
            grid = grid_of(group)
            values[:, i] = grid.nearest(new[:, i], grid.block_of[:, i - first])[1]
            error = (new[:, i] - values[:, i]) / factor[i, i]
            new[:, i:] -= error[:, None] * factor[i, i:]
    return values


def on_grid_of(weight, values, spec):
    """Whether all values are on the grid that the weight has."""
    grid = grid_of(quantize_tensor(weight.float(), spec))
    return torch.equal(grid.nearest(values, grid.block_of)[1].double(), values)


def test_stale_scales_are_told_apart():
    """They beat rounding to nearest as well, by a grid that is not that of the weight."""
    weight, hessian = normal(32, 64), hessian_of(64)
    values = with_stale_scales(weight, INT4, hessian, 32)
    nearest = quantize_tensor(weight.float(), INT4).dequantize().double()
    assert loss(values - weight, hessian).sum() < loss(nearest - weight, hessian).sum()
    assert not on_grid_of(weight, values, INT4)
    grid = grid_of(quantize_tensor(weight.float(), INT4))
    own = grid.nearest(rounded(weight, INT4, hessian)[2], grid.block_of)[1].double()
    assert on_grid_of(weight, own, INT4)


@pytest.mark.parametrize("mutation", ["dense inverse", "no feedback", "another layer"])
def test_mutations_that_also_beat_rounding_are_told_apart(mutation):
    weight, hessian = normal(64, 24), hessian_of(24)
    grid = grid_of(quantize_tensor(weight.float(), INT2))
    factor, _ = damped_factor(hessian, 1e-9)
    if mutation == "dense inverse":
        inverse = torch.linalg.inv(hessian)
        factor = inverse.triu() / inverse.diagonal().sqrt()[:, None]
    elif mutation == "no feedback":
        factor = torch.block_diag(*(factor[i : i + 8, i : i + 8] for i in range(0, 24, 8)))
    else:
        factor, _ = damped_factor(hessian_of(24, seed=9), 1e-9)
    codes, _, _ = gptq(weight, factor, grid, grid.block_of)
    assert not torch.equal(codes, surgeon(weight, INT2, hessian))


@pytest.mark.parametrize("name", ["activations", "groups", "natural"])
def test_orders(name):
    squares = torch.tensor([1.0, 5.0, 2.0, 9.0, 0.0, 3.0])
    found = order_of(name, squares, torch.tensor([0, 0, 1, 1, 2, 2])).tolist()
    wanted = {
        "activations": [3, 1, 5, 2, 0, 4], "groups": [3, 2, 1, 0, 5, 4], "natural": list(range(6)),
    }  # fmt: skip
    assert found == wanted[name]
    _, _, values = rounded(normal(9, 6), INT2, hessian_of(6), order=torch.tensor(found))
    assert bool(values.isfinite().all())


def test_a_singular_hessian_is_damped_more_and_says_so():
    x = normal(3, 16)
    _, damping = damped_factor(x.t() @ x, 1e-20)
    assert damping > 1e-20
    factor, damping = damped_factor(torch.zeros(4, 4, dtype=torch.float64), 0.01)
    assert damping == 0.01
    assert torch.equal(factor, torch.eye(4, dtype=torch.float64))


SPECS = [
    Spec("int8", (1, -1)),
    Spec("nf4", (1, 16), layout="packed"),
    Spec("f4e2m1", (1, 16), "e8m0", layout="packed"),
    Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed"),
    Spec("uint3", (1, 16), "bfloat16", "float", layout="packed"),
    Spec("uint4", (4, 16), "bfloat16", "offset", layout="packed"),
    Spec("codebook4", (1, -1), "bfloat16", layout="packed"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("columns", [48, 41])
def test_the_grid_of_every_format_is_that_of_the_reference(spec, columns):
    weight = normal(8, columns).float()
    q = quantize_tensor(weight, spec)
    grid = grid_of(q)
    codes, values = grid.nearest(weight, grid.block_of)
    torch.testing.assert_close(values, q.dequantize(torch.float32), rtol=1e-6, atol=1e-7)
    again = regridded(q, codes)
    assert isinstance(again, QTensor)
    assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("spec", [*SPECS, Spec("bf16", (1, -1), "none")], ids=str)
def test_levels_give_the_bits_of_the_grid(spec):
    """For several columns of the same blocks, codes encoded together at the end."""
    weight = normal(8, 32).float()
    q = quantize_tensor(weight, spec)
    grid = grid_of(q)
    level = grid.level(grid.block_of[:, 0])
    for x in (weight[:, 1] * 1.3, torch.zeros(8), weight[:, 2].double()):
        codes, values = grid.nearest(x, grid.block_of[:, 0])
        chosen = torch.empty(8, dtype=level.choice)
        assert torch.equal(level.nearest(x, chosen), values)
        assert torch.equal(grid.codes(chosen), codes)


def test_scales_are_those_of_the_weight_that_nothing_has_changed():
    """Groups are static: no scale is stale, whatever the blocks of columns are."""
    weight, spec = normal(16, 64), Spec("uint4", (1, 16), zero_point="int", layout="packed")
    q = quantize_tensor(weight.float(), spec)
    _, _, values = rounded(weight, spec, hessian_of(64), block=16)
    groups = values.view(16, 4, 16)
    steps = q.parts["scale"].double().view(16, 4, 1)
    assert bool(((groups / steps) - (groups / steps).round()).abs().lt(1e-4).all())
    for block in (1, 16, 64):
        assert torch.equal(rounded(weight, spec, hessian_of(64), block=block)[2], values)


def test_weights_of_the_same_inputs_share_a_factor(monkeypatch):
    found = []
    original = hessian.damped_factor
    monkeypatch.setattr(hessian, "damped_factor", lambda *a: found.append(a) or original(*a))
    inputs = hessian_of(24)
    order = torch.arange(24).flip(0)
    for _ in range(3):
        factor, _ = hessian.ordered_factor(inputs, order, 0.01)
    assert len(found) == 1
    assert torch.equal(factor, original(inputs[order][:, order], 0.01)[0])
    hessian.ordered_factor(inputs, order, 0.1)
    hessian.ordered_factor(inputs.clone(), order, 0.1)
    assert len(found) == 3
