"""Zero points in the domain of values: value = decode(code) * scale - zero."""

from __future__ import annotations

import pytest
import torch

from ao_core.numerics import choose_qparams, dequantize_affine, quantize_affine, sqnr
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor import QTensor, quantize_tensor
from ao_core.tensor.saving import flat_to_state_dict, state_dict_to_flat

NESTED = Spec("uint6", (1, 4), "float16", layout="packed")


def _x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["uint4", "int5", "f6e2m3", "nf4"])
def test_the_formula(name):
    dtype, x = registry.dtypes.get(name), _x(7, 50)
    scale, zero_point = choose_qparams(x, dtype, (1, 16), "offset", "bfloat16")
    assert zero_point.shape == scale.shape == (7, 4)
    assert zero_point.dtype == scale.dtype == torch.bfloat16
    codes = quantize_affine(x, dtype, (1, 16), scale, zero_point, is_offset=True)
    dense = dequantize_affine(codes, dtype, (1, 16), scale, zero_point, is_offset=True)
    by, off = (p.double().repeat_interleave(16, 1)[:, :50] for p in (scale, zero_point))
    expected = dtype.decode(codes).double() * by - off
    assert torch.allclose(dense.double(), expected, rtol=1e-6, atol=1e-6)
    codes_again = dtype.encode(((x + off.float()) / by.float()).float())
    assert torch.equal(codes, codes_again)


def test_within_half_a_step():
    x = _x(33, 70) + torch.tensor([0.0, 3.0, -3.0]).repeat(11)[:, None]
    q = quantize_tensor(x, Spec("uint4", (1, 16), zero_point="offset", layout="packed"))
    step = q.scale.repeat_interleave(16, 1)[:, :70]
    error = (q.dequantize() - x).abs() / step
    assert 0.45 < float(error.max()) <= 0.5001


def test_as_good_as_in_the_domain_of_codes():
    x = _x(64, 256)
    scaled, codes = (
        float(sqnr(x, quantize_tensor(x, Spec("uint4", (1, 32), zero_point=kind)).dequantize()))
        for kind in ("offset", "float")
    )
    assert scaled == pytest.approx(codes, abs=0.01)


@pytest.mark.parametrize("zero_scale", [1e4, 1e7])
def test_what_is_stored_is_finite(zero_scale):
    q = quantize_tensor(_x(4, 32) * zero_scale, Spec("uint2", (1, 16), "float16", "offset"))
    assert torch.isfinite(q.zero_point).all()
    assert torch.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("scale_method", ["mse", "hqq"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16", NESTED], ids=str)
def test_searches(scale_method, scale_dtype):
    """Better than the range, and near what they find for zero points in the domain of codes."""
    x = _x(32, 128)
    specs = {kind: Spec("uint3", (1, 32), scale_dtype, kind) for kind in ("offset", "float")}
    found = float(
        sqnr(x, quantize_tensor(x, specs["offset"], scale_method=scale_method).dequantize())
    )
    assert found > float(sqnr(x, quantize_tensor(x, specs["offset"]).dequantize())) + 0.2
    if scale_dtype != NESTED:
        other = quantize_tensor(x, specs["float"], scale_method=scale_method)
        assert found == pytest.approx(float(sqnr(x, other.dequantize())), abs=0.05)


def test_zero_points_are_quantized_as_scales_are():
    spec = Spec("uint4", (1, 16), NESTED, "offset", "packed")
    q = quantize_tensor(_x(5, 100), spec)
    for part in (q.scale, q.zero_point):
        assert isinstance(part, QTensor)
        assert part.spec == NESTED
        assert part.shape == (5, 7)
    # 50 bytes of codes per row, and 7 codes of 6 bits and 2 float16 numbers for each of the two
    assert q.stored_bytes == 5 * (50 + 2 * (6 + 4))
    state = flat_to_state_dict(*state_dict_to_flat({"w": q}))
    assert state["w"].spec == spec
    assert torch.equal(state["w"].dequantize(), q.dequantize())
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(q.index_select(0, rows).dequantize(), q.dequantize()[rows])
