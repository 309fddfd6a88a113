"""Rows computed and quantized in one pass, in Triton's interpreter, bit for bit those of the reference."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import encode_reference
from ao_core.testing.base import gaussian
from ao_kernels.triton.rows.op import row_codes
from ao_kernels.triton.rows.records import quantize, rms_norm_quantize, silu_mul_quantize

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

ROW = (1, WHOLE)
SPECS = (
    Spec("f8e4m3", ROW),
    Spec("f8e5m2", ROW),
    Spec("int8", ROW),
    Spec("uint8", ROW, zero_point="int"),
)


def hard(shape, dtype):
    """Numbers of all sizes: some rows are zeros, tiny, infinite, not numbers, or of one sign."""
    x = gaussian(shape) * torch.exp2(gaussian(shape, seed=1) * 4)
    x[0], x[1, 1::2] = 0.0, -0.0
    x[2] *= 1e-42
    x[3], x[4] = x[3].abs(), -x[4].abs()
    x[5, 1], x[6, 2], x[7, 0] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype)


def reference(op):
    """The plain function that says what the op computes."""
    return registry.ops.get(op).reference


def same(found, expected):
    """Equal bits, but for the sign of NaN."""
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        nan = part.float().isnan()
        assert torch.equal(found[name].float().isnan(), nan)
        bits = [each.contiguous().view(torch.uint8) for each in (found[name][~nan], part[~nan])]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(9, 5), (19, 130), (8, 1100)])
def test_rows_as_they_are(spec, shape):
    dtype = torch.float16 if shape[1] == 130 else torch.float32
    x = hard(shape, dtype)
    same(quantize(x, spec), encode_reference(x, spec))


def test_inputs_of_any_rank_and_stride():
    x, spec = gaussian((3, 6, 70)), SPECS[0]
    same(quantize(x.transpose(0, 1), spec), encode_reference(x.transpose(0, 1), spec))
    wider = torch.cat([x, x], -1)[..., 7:77]
    same(quantize(wider, spec), encode_reference(wider, spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_the_composition(spec, weighted):
    """Bit for bit; sums of squares are exact, since nobody says in which order they are summed."""
    x = (gaussian((2, 9, 100)) * 8).round().to(torch.float16)
    x[0, 0] = 0.0
    weight = gaussian((100,), seed=2).to(torch.float16) if weighted else None
    same(
        rms_norm_quantize(x, weight, 1e-5, spec),
        reference("rms_norm_quantize")(x, weight, 1e-5, spec),
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_silu_mul_is_the_composition(spec):
    """Bit for bit, after the rounding to float16: exponentials differ in the last place of float32."""
    both = gaussian((9, 2 * 300)).to(torch.float16)
    gate, up = both.chunk(2, -1)
    found = silu_mul_quantize(gate, up, spec)
    expected = reference("silu_mul_quantize")(gate, up, spec)
    same(found, expected)


def test_silu_of_what_is_large():
    gate = torch.tensor([[-1e4, -100.0, 100.0, 1e4, torch.nan]])
    found = silu_mul_quantize(gate[:, :4], torch.ones(1, 4), SPECS[0])
    same(found, reference("silu_mul_quantize")(gate[:, :4], torch.ones(1, 4), SPECS[0]))
    assert silu_mul_quantize(gate, torch.ones(1, 5), SPECS[0])["scale"].isnan().all()


@pytest.mark.parametrize("source", ["plain", "rms_norm", "silu_mul"])
def test_custom_op(source):
    """Schema, fake implementation and registration, for `torch.compile`."""
    x = gaussian((3, 40))
    other = {"plain": None, "rms_norm": gaussian((40,)), "silu_mul": gaussian((3, 40), seed=1)}
    args = (x, other[source], "uint8", source, 1e-5)
    results = torch.library.opcheck(row_codes, args)
    assert set(results.values()) == {"SUCCESS"}, results


def test_the_kernels_of_the_table_are_these():
    for numbers in ("float8", "int8"):
        for op, fn in (("quantize", quantize), ("rms_norm_quantize", rms_norm_quantize)):
            assert registry.kernels.get(f"triton_{numbers}_{op}").fn is fn
