"""The kernels of sums over blocks on the CPU, and searches for scales with them."""

from __future__ import annotations

import pytest
import torch

from ao_core import Spec, kernels, quantize_tensor
from ao_core.ext.kernels import encode_reference
from ao_core.ext.numerics import choose_qparams, error_sums
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_sums import dequantized_sums
from ao_kernels.cpu.sums import scale_sums as kernel

NAMES = ("int4", "uint4", "int8", "f4e2m1", "f8e4m3", "nf4", "ternary")


class TestScaleSums(KernelSuite):
    kernel = "cpu_scale_sums"


class TestSearchScales(KernelSuite):
    kernel = "cpu_search_scales"


class TestLearnedGradients(KernelSuite):
    kernel = "cpu_learned_gradients"


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_those_of_quantize(name: str) -> None:
    """Elements half way between two codes: other ones would change the sums of e x by much."""
    spec = Spec(name, (1, -1))
    x = torch.arange(-40, 41).mul(0.25).expand(3, 81) * torch.tensor([[1.0], [0.75], [1.5]])
    scale = torch.tensor([[0.5, 1.0, 3.0, 0.375], [0.75] * 4, [1.5] * 4])
    sums = kernel(x, scale, None, None, None, spec).double()
    expected = dequantized_sums(x, scale, None, None, None, spec)
    square = x.double().square().sum(1, keepdim=True)
    assert ((sums - expected).abs() <= 1e-5 * (1 + square)).all()


@pytest.mark.parametrize(
    ("name", "zero_point"),
    [
        (name, zero_point)
        for name in NAMES
        for zero_point in ("none", "int", "float")
        if zero_point != "int" or name in ("int4", "uint4", "int8")  # which needs integers
    ],
)
@pytest.mark.parametrize("method", ["mse", "hqq"])
def test_searches_find_what_they_find_in_plain_torch(
    method: str, name: str, zero_point: str
) -> None:
    """As good a scale at least, but for candidates that are as good as each other in float32."""
    x = gaussian((24, 200)).bfloat16()
    spec = Spec(name, (1, 40), "bfloat16", zero_point)
    found = quantize_tensor(x, spec, scale_method=method)
    with kernels("reference"):
        other = quantize_tensor(x, spec, scale_method=method)
    same = (found.scale == other.scale).double().mean()
    assert same > 0.9
    noise, of_other = (float(error_sums(x, w.dequantize())[1]) for w in (found, other))
    assert abs(noise - of_other) <= 0.01 * of_other


def test_no_block_is_worse_than_absmax() -> None:
    x = torch.distributions.StudentT(2.5).sample((64, 320)).bfloat16()
    x[3] = 0.0
    x[5] *= 1e-25
    for name in NAMES:
        spec = Spec(name, (1, 32), "bfloat16")
        scale, _ = choose_qparams(
            x, quantize_tensor(x, spec).format, spec.block, "none", "bfloat16"
        )
        for method in ("mse", "hqq"):
            found = quantize_tensor(x, spec, scale_method=method)
            plain = quantize_tensor(x, spec, scale=scale)
            errors = [
                (q.dequantize(torch.float32).double() - x.double()).square().unflatten(1, (10, 32))
                for q in (found, plain)
            ]
            assert (errors[0].sum(-1) <= errors[1].sum(-1) * (1 + 1e-12)).all()


@pytest.mark.parametrize("layout", ["plain", "packed", "flat"])
@pytest.mark.parametrize(
    ("name", "zero_point"),
    [("int4", "none"), ("uint3", "int"), ("uint4", "float"), ("nf4", "none")],
)
def test_codes_of_found_scales_are_those_of_the_reference(
    layout: str, name: str, zero_point: str
) -> None:
    """Bit for bit, with negative scales too, whether `quantize_scaled` has a kernel or not."""
    x = gaussian((24, 96)).bfloat16()
    block = (32,) if layout == "flat" else (1, 32)
    spec = Spec(name, block, "bfloat16", zero_point, layout=layout)
    found = quantize_tensor(x, spec, scale_method="mse")
    expected = encode_reference(x, spec, found.parts["scale"], found.parts.get("zero_point"))
    assert found.parts.keys() == expected.keys()
    for part, values in expected.items():
        assert torch.equal(found.parts[part].view(torch.uint8), values.view(torch.uint8)), part


def test_the_unit_of_errors_does_not_matter_near_the_ends_of_float32() -> None:
    """Powers of errors would be infinite, or have no digits."""
    x = gaussian((16, 64))
    spec = Spec("int4", (1, 32), "float32")
    near = quantize_tensor(x, spec, scale_method="hqq")
    for factor in (2.0**-100, 2.0**110):
        far = quantize_tensor(x * factor, spec, scale_method="hqq")
        worse = (far.dequantize() / factor - x).norm() - (near.dequantize() - x).norm()
        assert worse.abs() <= 1e-3 * x.norm()
