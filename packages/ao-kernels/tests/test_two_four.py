"""Kernels for the layout `two_four`, on weights made by its definition, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, Parts, registry
from ao_core.ext.numerics import expand, full_block, grid_shape, pack_bits
from ao_kernels.cpu.library import load
from ao_kernels.cpu.two_four import TWO_FOUR_KERNELS, dequantize_two_four, group_of

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
MATMUL, DEQUANTIZE = TWO_FOUR_KERNELS
DENSE = (
    *(Spec(name, ROW, NO_SCALE, layout="two_four") for name in ("fp32", "bf16", "fp16")),
    Spec("fp32", (1,), NO_SCALE, layout="two_four"),
)
CODED = (
    Spec("int8", ROW, layout="two_four"),
    Spec("int8", TENSOR, "float16", layout="two_four"),
    Spec("int4", (1, 32), "bfloat16", layout="two_four"),
    Spec("int4", (1, 96), layout="two_four"),
    Spec("int4", ROW, "float16", layout="two_four"),
)
#: whose codes only `dequantize` reads
OTHERS = (
    Spec("f8e4m3", ROW, layout="two_four"),
    Spec("nf4", (1, 64), "bfloat16", layout="two_four"),
    Spec("f4e2m1", (1, 32), layout="two_four"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: whole windows, their ends, and less than one group
SHAPES = ((7, 100), (4, 256), (9, 3), (5, 61), (1, 160))


class Weight(NamedTuple):
    spec: Spec
    parts: Parts
    #: exact values
    values: Tensor


def weight(spec: Spec, shape: tuple[int, int]) -> Weight:
    """Two values of every four columns, at any two places."""
    load()
    generator = torch.Generator().manual_seed(sum(shape))
    fmt, (n, k) = registry.dtypes.get(spec.dtype), shape
    fours = -(-k // 4)
    order = torch.rand(n, fours, 4, generator=generator).argsort(-1)
    places = order[..., :2].sort(-1).values
    dense = torch.zeros(n, fours, 4).scatter_(
        -1, places, torch.randn(n, fours, 2, generator=generator)
    )
    dense = dense.flatten(1)
    dense[:, k:] = 0
    parts: Parts = {}
    if fmt.has_scale:
        grid = grid_shape(shape, spec.block)
        scale = (torch.rand(grid, generator=generator) + 0.5).to(
            getattr(torch, str(spec.scale_dtype))
        )
        block = full_block(spec.block, shape)
        wide = expand(scale.float(), shape, block).expand(shape)
        codes = fmt.encode(F.pad(dense[:, :k] / wide * fmt.max / 3, (0, 4 * fours - k)))
        values = fmt.decode(codes)[:, :k].double() * wide.double()
        parts["scale"] = scale
    else:
        codes = dense.to(fmt.storage)
        values = codes[:, :k].double()
    kept = codes.view(n, fours, 4).gather(-1, places).flatten(1)
    index = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    index = F.pad(index, (0, fours % 2), value=0b0100)
    parts["qdata"] = pack_bits(kept, fmt.bits) if fmt.bits < 8 else kept.view(fmt.storage)
    parts["index"] = pack_bits(index, 4)
    return Weight(spec, parts, values)


def matmul(made: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """By the op, which needs no layout of that name to be registered."""
    parts, group = made.parts, group_of(made.spec, tuple(made.values.shape))
    out: Tensor = torch.ops.ao_kernels.two_four_linear(
        x, parts["qdata"], parts["index"], parts.get("scale"), bias, group
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*DENSE, *CODED], ids=str)
def test_matmul(spec: Spec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        n, k = shape
        made = weight(spec, shape)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        for m in (1, 2, 4, 5, 16):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
            call = Call("linear", spec, shape, (m, k), dtype, "cpu")
            assert MATMUL.refuses(call) is None
            expected = x.double() @ made.values.T + bias.double()
            out = matmul(made, x, bias)
            assert (out.shape, out.dtype) == ((m, n), dtype)
            rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            assert (out.double() - expected).norm() <= rounding * expected.norm()
            assert torch.equal(matmul(made, x[:1], bias), out[:1])
            assert torch.equal(matmul(made, x.t().contiguous().t(), bias), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*DENSE, *CODED, *OTHERS], ids=str)
def test_dequantize_is_rounded_once(spec: Spec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        made = weight(spec, shape)
        assert DEQUANTIZE.refuses(Call("dequantize", spec, shape, shape, dtype, "cpu")) is None
        dense = dequantize_two_four(made.parts, spec, shape, dtype)
        assert torch.equal(dense, made.values.float().to(dtype))


def test_dequantize_experts() -> None:
    spec, (n, k) = CODED[2], (6, 100)
    made = weight(spec, (n, k))
    parts = {name: part.unflatten(0, (2, 3)) for name, part in made.parts.items()}
    dense = dequantize_two_four(parts, spec, (2, 3, k), torch.float32)
    assert torch.equal(dense.flatten(0, 1), made.values.float())


@pytest.mark.parametrize(
    ("spec", "m", "text"),
    [
        (OTHERS[0], 1, "not f8e4m3"),
        (CODED[0], 25, "24 rows at most, found 25"),
        (
            Spec("int8", ROW, act=Spec("int8", ROW), layout="two_four"),
            1,
            "does not quantize activations",
        ),
        (Spec("int4", (1, 16), layout="two_four"), 1, "multiples of 32 columns, found 16"),
        (Spec("int8", ROW, "e8m0", layout="two_four"), 1, "scales in float32"),
        (Spec("int8", (2, WHOLE), layout="two_four"), 1, "single rows"),
        (Spec("int8", ROW, zero_point="int", layout="two_four"), 1, "no zero points"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_matmul_refuses(spec: Spec, m: int, text: str) -> None:
    reason = MATMUL.refuses(Call("linear", spec, (8, 64), (m, 64), torch.float32, "cpu"))
    assert reason is not None
    assert text in reason


@pytest.mark.parametrize(
    ("spec", "dtype", "text"),
    [
        (Spec("int3", ROW, layout="two_four"), torch.float32, "4 and 8 bits"),
        (CODED[0], torch.float64, "not torch.float64"),
    ],
    ids=str,
)
def test_what_dequantize_refuses(spec: Spec, dtype: torch.dtype, text: str) -> None:
    reason = DEQUANTIZE.refuses(Call("dequantize", spec, (8, 64), (8, 64), dtype, "cpu"))
    assert reason is not None
    assert text in reason
