"""Emulated matmuls in bfloat16 are those of the reference, which multiplies in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ao_core import WHOLE, Call, Spec
from ao_core.dispatch import select
from ao_core.tensor.encoding import fake_quantize
from ao_core.torch_kernels.emulated_mm import EMULATED_MM_KERNELS, bfloat16_mm
from ao_core.torch_kernels.reference import mm

(KERNEL,) = EMULATED_MM_KERNELS
ROW, TENSOR, MX = (1, WHOLE), (WHOLE, WHOLE), (1, 32)


def both(dtype: str, block: tuple[int, int], scale_dtype: str = "float32") -> Spec:
    return Spec(dtype, block, scale_dtype, act=Spec(dtype, block, scale_dtype))


SPECS = {
    "tensor": both("f8e4m3", TENSOR),
    "row": both("f8e4m3", ROW),
    "int8": both("int8", TENSOR),
    "mxfp8": both("f8e5m2", MX, "e8m0"),
    "mxfp4": both("f4e2m1", MX, "e8m0"),
    "row and tensor": replace(both("f8e4m3", TENSOR), act=Spec("f8e5m2", ROW)),
    "one operand": Spec("f6e2m3", MX, "e8m0"),
}


def operands(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes."""
    sizes = torch.logspace(-3, 2, m)[:, None]
    return (sizes * torch.randn(m, k)).to(dtype), torch.randn(n, k).to(dtype)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", [(64, 128, 48), (1, 96, 33), (5, 70, 1)])
def test_matmuls_are_those_of_the_reference(spec: Spec, shape: tuple[int, int, int]) -> None:
    a, b = operands(*shape)
    found = bfloat16_mm(a, b, spec)
    assert found.dtype == torch.bfloat16
    cast_a = a.double() if spec.act is None else fake_quantize(a.float(), spec.act).double()
    cast_b = fake_quantize(b.float(), spec).double()
    exact, size = cast_a @ cast_b.t(), cast_a.abs() @ cast_b.abs().t()
    error = (found.double() - exact).abs()
    # the output is rounded to 8 bits, twice where scales come afterwards, and sums are in float32
    assert (error <= 2 * 2.0**-8 * exact.abs() * (1 + 2.0**-8) + 2.0**-20 * size).all()
    assert (
        (mm(a, b, spec).double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * size
    ).all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_transposed_operands(spec: Spec) -> None:
    """Those of the backward pass, a scale of a tensor being that of its transpose."""
    a, b = operands(32, 64, 96)
    expected = bfloat16_mm(a, b, spec)
    assert torch.equal(bfloat16_mm(a.t().contiguous().t(), b.t().contiguous().t(), spec), expected)


@pytest.mark.parametrize("name", ["tensor", "row", "mxfp8"])
def test_numbers_that_are_none(name: str) -> None:
    spec = SPECS[name]
    a, b = operands(4, 64, 8)
    a[1, 3], a[2] = torch.nan, 0
    found = bfloat16_mm(a, b, spec)
    assert found[1].isnan().all()
    if name != "tensor":
        assert (found[2] == 0).all()
        assert torch.equal(found.isnan(), mm(a, b, spec).isnan())


@pytest.mark.parametrize("name", ["tensor", "row", "mxfp8"])
def test_weights_in_float32(name: str) -> None:
    """Beside activations in bfloat16, as under autocast."""
    a, b = operands(17, 64, 8)
    assert torch.equal(bfloat16_mm(a, b.float(), SPECS[name]), bfloat16_mm(a, b, SPECS[name]))


def test_it_is_emulation_where_nothing_faster_is() -> None:
    for spec in SPECS.values():
        call = Call("mm", spec, (96, 64), (32, 64), torch.bfloat16, "cpu")
        assert KERNEL.refuses(call) is None
        assert select(call).priority < 0 or select(call).name == "int_matmul"
    assert select(replace(call, x_dtype=torch.float32)).priority < KERNEL.priority


def test_what_bfloat16_does_not_hold_is_multiplied_in_float32() -> None:
    call = Call("mm", SPECS["row"], (96, 64), (32, 64), torch.bfloat16, "cpu")
    refused = {
        "not torch.float16": replace(call, x_dtype=torch.float16),
        "all values of nf4": replace(call, spec=both("nf4", ROW)),
        "powers of two": replace(call, spec=both("f8e4m3", (1, 128))),
        "zero points": replace(call, spec=replace(both("uint8", ROW), zero_point="int")),
    }
    for reason, each in refused.items():
        assert reason in (KERNEL.refuses(each) or "")
