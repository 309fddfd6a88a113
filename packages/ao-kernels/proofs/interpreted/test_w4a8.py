"""Matmuls of activations in 8 bits with weights in 4 in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.kernels import encode_parts
from ao_core.ext.numerics import full_block
from ao_core.testing.base import gaussian
from ao_core.testing.samples import activations
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.w4a8.launch import launch, plane32_linear, tile_config_of
from ao_kernels.triton.w4a8.records import linear

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
INT8, UINT8, FLOAT8 = Spec("int8", ROW), Spec("uint8", ROW, zero_point="int"), Spec("f8e4m3", ROW)
#: every group, kind of zero points and type of scales, beside each kind of activations
SPECS = (
    Spec("int4", (1, 32), "bfloat16", act=UINT8),
    Spec("int4", (1, 64), "float32", act=INT8),
    Spec("int4", (1, 128), "float16", act=FLOAT8),
    Spec("int4", (1, WHOLE), "float32", act=UINT8),
    Spec("int4", (1, WHOLE), "float32", act=FLOAT8),
    Spec("uint4", (1, 256), "float16", "int", act=INT8),
    Spec("uint4", (1, 64), "float32", "float", act=UINT8),
    Spec("uint4", (1, 32), "float32", "int", act=FLOAT8),
    Spec("uint4", (1, WHOLE), "bfloat16", "int", act=UINT8),
    Spec("int4", (1, 128), act=Spec("uint8", TENSOR, zero_point="int", static=True)),
)
#: rows and columns that tiles do not divide; less than a tile, and columns that 16 does not divide
SHAPES = ((140, 304), (33, 70), (100, 520))


def weight(spec: Spec, shape: tuple[int, int]) -> QTensor:
    static = spec.act is not None and spec.act.static
    given = {"act_scale": 0.03, "act_zero_point": 77} if static else {}
    packed = quantize_tensor(gaussian(shape), replace(spec, layout="packed"), **given)
    return to_layout(packed, "plane32")


def operands(x: torch.Tensor, w: QTensor) -> tuple[object, ...]:
    """What the op takes of activations and a weight, but for the bias."""
    assert w.spec.act is not None
    left = encode_parts(x, w.spec.act, w.parts.get("act_scale"), w.parts.get("act_zero_point"))
    parts = [w.parts.get(name) for name in ("qdata", "scale", "zero_point", "sums")]
    return (left["qdata"], left["scale"], left.get("zero_point"), *parts)


def sizes(w: QTensor) -> tuple[object, ...]:
    return w.shape[0], full_block(w.spec.block, w.shape)[-1], w.spec.dtype


#: of those, a spec of each kind in every change
CHOSEN = (SPECS[0], SPECS[2], SPECS[3], SPECS[6])
CASES = [(spec, shape) for shape in SHAPES for spec in SPECS]


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        pytest.param(
            *case, marks=() if case[0] in CHOSEN and case[1] == SHAPES[0] else pytest.mark.slow
        )
        for case in CASES
    ],
    ids=str,
)
def test_linear(spec, shape):
    """Products of integers are exact; what is rounded are scaled sums, and in float8 all, in float32."""
    w, bias = weight(spec, shape), gaussian(shape[:1], seed=7)
    bound = 3e-6 if spec.act == FLOAT8 else 1e-6
    for m, splits in ((1, 1), (17, 2)):
        near(w, m, bias, splits, bound)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[6]], ids=str)
@pytest.mark.parametrize("m", [50, 130])
def test_more_rows(spec, m):
    """In one block, and in several."""
    near(weight(spec, (140, 304)), m, None, 1, 1e-6)


def near(w, m, bias, splits, bound):
    x = gaussian((m, w.shape[1]), seed=m) + 0.5
    splits = min(splits, w.qdata.shape[1])  # no launch has a split without a tile
    setting = LaunchConfig(tile_config_of(m, zero_point=w.spec.zero_point != "none"), splits)
    out = launch(*operands(x, w), bias, *sizes(w), torch.float32, setting=setting)
    expected = activations(x, w) @ w.dequantize(torch.float32).double().t()
    if bias is not None:
        expected += bias.double()
    assert (out.shape, out.dtype) == (expected.shape, torch.float32)
    assert (out.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inputs_of_any_rank(dtype):
    """The kernel of the registry; bfloat16 is wrong in the interpreter."""
    w = weight(SPECS[0], (33, 70))
    x, bias = gaussian((2, 3, 70)).to(dtype), gaussian((33,)).to(dtype)
    out = linear(x, w, bias)
    expected = registry.kernels.get("reference_linear").fn(x.double(), w, bias.double())
    assert (out.shape, out.dtype) == ((2, 3, 33), dtype)
    bound = 1e-6 if dtype == torch.float32 else 1e-3
    assert (out.double() - expected).norm() <= bound * expected.norm()
    assert torch.equal(linear(x[0, 0], w, bias), out[0, 0])
    assert linear(x[:, :0], w, bias).shape == (2, 0, 33)


def test_the_largest_sums():
    """Of groups of 256 and of whole rows: every matmul has the largest magnitude that there is."""
    for group in (256, WHOLE):
        w = weight(Spec("int4", (1, group), "float32", act=INT8), (16, 512))
        qdata, scale = torch.full_like(w.qdata, -0x77777778), torch.ones_like(w.scale)
        codes = torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, 512).contiguous()
        out = launch(
            codes, torch.ones(2, 1), None, qdata, scale, None, None, None,
            16, 256 if group == 256 else 512, "int4", torch.float32,
        )  # fmt: skip
        expected = torch.tensor([[8.0 * 128 * 512], [-8.0 * 127 * 512]]).expand(2, 16)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("act", [INT8, FLOAT8], ids=str)
def test_what_is_not_finite_stays_in_its_row(act):
    w = weight(Spec("int4", (1, 32), "float32", act=act), (16, 70))
    x = gaussian((3, 70))
    x[1, 69] = torch.nan
    out = linear(x, w, None)
    assert out.isnan().all(-1).tolist() == [False, True, False]
    assert out[::2].isfinite().all()


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[5]], ids=str)
def test_custom_op(spec):
    """Schema, fake implementation and registration, for `torch.compile`."""
    w = weight(spec, (16, 70))
    args = (*operands(gaussian((3, 70)), w), gaussian((16,)), *sizes(w), torch.float16)
    results = torch.library.opcheck(plane32_linear, args)
    assert set(results.values()) == {"SUCCESS"}, results
