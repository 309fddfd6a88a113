"""Zero points that are no codes of their format, as 16 with 4 bits: every route gives what they mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import Call, QTensor, Spec, quantize_tensor
from ao_core.ext import UnsupportedOp, repack, to_layout
from ao_core.ext.kernels import has_foreign_zeros, run, unpack_parts

SHAPE, GROUP = (48, 128), 32


def with_zeros(bits: int, layout: str, greatest: int) -> tuple[QTensor, torch.Tensor]:
    """A weight with zero points up to `greatest`, and its values in float64, written out."""
    spec = Spec(f"uint{bits}", (1, GROUP), "float16", "int", layout)
    made = quantize_tensor(torch.randn(SHAPE), spec)
    zeros = made.zero_point.clone()
    zeros[:, 1], zeros[3] = greatest, max(greatest - 1, 0)
    weight = QTensor({**made.parts, "zero_point": zeros}, spec, SHAPE, torch.float32)
    codes, scale, _ = unpack_parts(made.parts, spec, SHAPE)
    values = codes.reshape(*zeros.shape, GROUP).double() - zeros[..., None].double()
    return weight, (values * scale[..., None].double()).reshape(SHAPE)


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("over", ["least", "greatest"])
def test_every_route_takes_them_for_numbers(bits, layout, over) -> None:
    weight, values = with_zeros(bits, layout, 1 << bits if over == "least" else 255)
    assert has_foreign_zeros(weight.parts, weight.spec, weight.format)
    x = torch.randn(5, SHAPE[1])
    for each in (weight, repack(weight)):
        assert torch.equal(each.dequantize(torch.float32), values.float())
        assert torch.equal(F.embedding(torch.arange(48), each), values.float())
        for rows in (1, 5):
            expected = x[:rows].double() @ values.T
            error = (F.linear(x[:rows], each).double() - expected).abs().max()
            assert error <= 1e-5 * expected.abs().max()
    dense = torch.randn(SHAPE)
    call = Call("error_sums", weight.spec, SHAPE, SHAPE, torch.float32, "cpu")
    sums = run(call, dense, weight, 3)
    expected = torch.stack(
        [dense[::3].double().square().sum(), (dense - values)[::3].double().square().sum()]
    )
    assert torch.allclose(sums, expected, rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_layouts_of_kernels_refuse_them(bits) -> None:
    weight, _ = with_zeros(bits, "packed", 1 << bits)
    with pytest.raises(UnsupportedOp, match=f"from 0 to {(1 << bits) - 1}.* found {1 << bits}"):
        to_layout(weight, "cpu_tiles")
    assert repack(weight).spec.layout == "packed"
    most, values = with_zeros(bits, "packed", (1 << bits) - 1)
    assert not has_foreign_zeros(most.parts, most.spec, most.format)
    assert torch.equal(to_layout(most, "cpu_tiles").dequantize(torch.float32), values.float())
