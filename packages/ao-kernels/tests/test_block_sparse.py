"""The layout `bsr_cpu` and its matmul, on weights made by the definition of `bsr`, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, QTensor, Spec
from ao_core.ext import NO_SCALE, Parts, registry
from ao_core.ext.kernels import select
from ao_kernels.cpu.block_sparse import BsrCpu

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
INT8 = Spec("int8", ROW)
LAYOUT = BsrCpu()
SPECS = (
    Spec("fp32", ROW, NO_SCALE),
    Spec("bf16", ROW, NO_SCALE),
    Spec("fp16", ROW, NO_SCALE),
    Spec("int8", ROW),
    Spec("int8", TENSOR, "bfloat16"),
    Spec("int8", ROW, "float16", act=INT8),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: ragged, whole, less than a block
SHAPES = ((70, 100), (64, 96), (5, 7), (130, 33))


class Weight(NamedTuple):
    w: QTensor
    #: canonical parts
    parts: Parts
    #: exact values
    values: Tensor


def sized(spec: Spec, side: int) -> Spec:
    """The format in the kernel's layout, in blocks of a side."""
    return Spec(
        spec.dtype,
        spec.block,
        spec.scale_dtype,
        "none",
        "bsr_cpu",
        spec.act,
        (("blocksize", side),),
    )


def weight(spec: Spec, shape: tuple[int, int], side: int, share: float = 0.5) -> Weight:
    """Normal values of which a share of the blocks is stored."""
    generator = torch.Generator().manual_seed(sum(shape) + side)
    fmt, (n, k) = registry.dtypes.get(spec.dtype), shape
    rows, columns = -(-n // side), -(-k // side)
    kept = torch.rand(rows, columns, generator=generator) < share
    spread = kept.repeat_interleave(side, 0).repeat_interleave(side, 1)[:n, :k]
    dense = torch.where(spread, torch.randn(shape, generator=generator), 0)
    parts: Parts = {}
    if fmt.bits == 8:
        greatest = (
            dense.abs().amax(1, keepdim=True)
            if spec.block == ROW
            else dense.abs().amax().view(1, 1)
        )
        scale = (greatest.clamp(min=0.1) / 127).to(getattr(torch, str(spec.scale_dtype)))
        codes = (dense / scale.float()).round().clamp(-127, 127).to(torch.int8)
        values, parts["scale"] = codes.double() * scale.double(), scale
    else:
        codes = dense.to(fmt.storage)
        values = codes.double()
    padded = F.pad(codes, (0, columns * side - k, 0, rows * side - n))
    blocks = padded.view(rows, side, columns, side).transpose(1, 2)
    parts |= {
        "qdata": blocks[kept].contiguous(),
        "col_indices": kept.nonzero()[:, 1].to(torch.int32),
        "crow_indices": F.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32),
    }
    sized_spec = sized(spec, side)
    assert LAYOUT.refuses(sized_spec, shape, fmt) is None
    stored = LAYOUT.from_canonical(parts, sized_spec, shape, fmt)
    return Weight(QTensor(stored, sized_spec, shape, torch.float32), parts, values)


def quantized(x: Tensor, spec: Spec) -> Tensor:
    """What the matmul sees of activations, in float64."""
    if spec.act is None:
        return x.double()
    scale = x.float().abs().amax(-1, keepdim=True) / 127.5
    codes = (x.float() / scale).round().clamp(-128, 127)
    return codes.double() * scale.double()


def check(made: Weight, m: int, dtype: torch.dtype) -> None:
    n, k = made.values.shape
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    call = Call("linear", made.w.spec, (n, k), (m, k), dtype, "cpu")
    assert select(call).name == "bsr_cpu_linear"
    expected = quantized(x, made.w.spec) @ made.values.T + bias.double()
    out = F.linear(x, made.w, bias)
    assert (out.shape, out.dtype) == ((m, n), dtype)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (out.double() - expected).norm() <= rounding * expected.norm()
    # as near to it as what the rows give one by one: how many there are does not matter
    assert torch.equal(F.linear(x[:1], made.w, bias), out[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
class TestMatmul:
    @pytest.mark.parametrize("m", [1, 2, 6, 7, 13, 70])
    def test_rows(self, spec: Spec, dtype: torch.dtype, m: int) -> None:
        check(weight(spec, (70, 100), 16), m, dtype)

    @pytest.mark.parametrize("side", [16, 32, 48, 64, 80, 256])
    def test_blocks(self, spec: Spec, dtype: torch.dtype, side: int) -> None:
        for shape in SHAPES:
            check(weight(spec, shape, side), 9, dtype)

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_none_and_all_of_the_blocks(self, spec: Spec, dtype: torch.dtype, share: float) -> None:
        check(weight(spec, (70, 100), 32, share), 5, dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("side", [16, 48, 64])
def test_layout_is_exact_both_ways(spec: Spec, side: int) -> None:
    fmt = registry.dtypes.get(spec.dtype)
    for shape in SHAPES:
        made = weight(spec, shape, side)
        back = LAYOUT.to_canonical(made.w.parts, made.w.spec, shape, fmt)
        assert set(back) == set(made.parts)
        assert all(torch.equal(back[name], part) for name, part in made.parts.items())
        assert back["qdata"].dtype == made.parts["qdata"].dtype


def test_nothing_is_read_of_empty_blocks() -> None:
    """What stands in the activations there, NaN too, has no part in the matmul."""
    made = weight(SPECS[1], (32, 64), 32, 1.0)
    parts = dict(made.parts, crow_indices=torch.tensor([0, 1], dtype=torch.int32))
    parts |= {"qdata": parts["qdata"][:1], "col_indices": parts["col_indices"][:1]}
    stored = LAYOUT.from_canonical(parts, made.w.spec, (32, 64), made.w.format)
    x = torch.randn(3, 64)
    expected = x[:, :32].double() @ made.values[:, :32].T
    x[:, 32:] = torch.nan
    out = F.linear(x, QTensor(stored, made.w.spec, (32, 64), torch.float32))
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


def test_nan_and_infinity_in_stored_blocks_stay() -> None:
    made = weight(SPECS[1], (32, 64), 32, 1.0)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    out = F.linear(x, made.w)
    assert out[0].isnan().all()
    assert out[1].isinf().all()


def test_activations_that_are_not_contiguous() -> None:
    made = weight(SPECS[1], (70, 100), 16)
    wide = torch.randn(5, 200).bfloat16()
    for x in (wide[:, :100], wide[:, ::2], wide.view(5, 2, 100).transpose(0, 1)):
        assert torch.equal(F.linear(x, made.w), F.linear(x.contiguous(), made.w))


@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        (
            Spec("f8e4m3", ROW, layout="bsr_cpu"),
            (64, 64),
            "holds fp32, fp16, bf16, int8, not f8e4m3",
        ),
        (sized(SPECS[1], 24), (64, 64), "blocksize=24"),
        (sized(SPECS[1], 512), (64, 64), "blocksize=512"),
        (sized(SPECS[1], 64), (2, 64, 64), "2 dimensions"),
        (sized(Spec("int8", (1, 32)), 64), (64, 64), "one scale per row"),
        (sized(Spec("int8", ROW, "e8m0"), 64), (64, 64), "scales in float32"),
        (
            sized(Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int")), 64),
            (64, 64),
            "per token",
        ),
        (sized(Spec("int8", ROW, act=INT8), 64), (64, 70000), "at most 65536"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_it_refuses(spec: Spec, shape: tuple[int, ...], text: str) -> None:
    reason = LAYOUT.refuses(spec, shape, registry.dtypes.get(spec.dtype))
    assert reason is not None
    assert text in reason


def test_places_are_looked_at() -> None:
    """Blocks that are none would be read somewhere in memory."""
    made = weight(SPECS[1], (64, 64), 16)
    op, x = torch.ops.ao_kernels.block_sparse_linear, torch.zeros(1, 64)
    qdata, columns, starts = (
        made.w.parts[name] for name in ("qdata", "col_indices", "crow_indices")
    )
    for bad in (columns + 4, columns - 4):
        with pytest.raises(
            RuntimeError, match=r"^col_indices: entry \d+ is -?\d+; must be in 0..3"
        ):
            op(x, qdata, bad, starts, None, None, 64, 0)
    with pytest.raises(RuntimeError, match="^crow_indices: runs from 1"):
        op(x, qdata, columns, starts + 1, None, None, 64, 0)
    with pytest.raises(RuntimeError, match="^crow_indices: entry"):
        op(x, qdata, columns, starts[[0, 4, 1, 2, 4]], None, None, 64, 0)
