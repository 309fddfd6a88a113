"""Matmuls with the weights of experts in planes in Triton's interpreter, on ragged shapes, against float64.

Activations are in float16, and plain operations stand for assembly; see `test_plane16`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.numerics import full_block
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared.kernel_offsets import find
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.weight_only import op_experts as experts
from ao_kernels.triton.weight_only.launch import TILE_CONFIGS

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SPECS = (
    Spec("int4", (1, 128), "float16"),
    Spec("uint4", (1, 64), "float16", "int"),
    Spec("int4", (1, WHOLE), "float16"),
    Spec("uint4", (1, WHOLE), "float32", "float"),
    Spec("nf4", (1, 64), "float16"),
    Spec("int8", (1, WHOLE), "float32"),
    Spec("f8e4m3", (1, 128), "float32"),
    Spec("f4e2m1", (1, 32), "e8m0"),
    Spec("f4e2m1", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("int4", (1, 64), "float16", layout="two_four"),
)
LAYOUTS = {4: ("packed", "plane16"), 8: ("plain", "plane16_bytes")}
ALL = [*SPECS[:2], *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS[2:])]
#: experts, rows and columns that no tile divides
SHAPE = (3, 140, 300)
SMALL = (3, 16, 150)
#: rows of each expert and those of none; with how many splits
COUNTS = (((3, 17, 0, 4), 1), ((0, 0, 0, 5), 1), ((0, 2, 1, 0), 2))


def weight(spec: Spec, shape: tuple[int, ...] = SHAPE) -> QTensor:
    canonical, planes = LAYOUTS[registry.dtypes.get(spec.dtype).bits]
    if spec.layout == "two_four":
        canonical, planes = "two_four", "plane24"
    return to_layout(quantize_tensor(gaussian(shape), replace(spec, layout=canonical)), planes)


def arguments(w: QTensor, offs: torch.Tensor) -> tuple[object, ...]:
    *_, n, k = w.shape
    group = full_block(w.spec.block, (n, k))[-1]
    parts = (w.qdata, w.scale, w.parts.get("zero_point"), w.table, offs)
    return (
        *parts,
        n,
        k,
        group,
        w.spec.dtype,
        w.spec.layout == "plane24",
        w.parts.get("global_scale"),
    )


def kernel(op: str, w: QTensor):
    return registry.kernels.get(f"triton_{w.spec.layout}_{op}").fn


def expected(x: torch.Tensor, w: QTensor, counts: tuple[int, ...]) -> torch.Tensor:
    dense = w.dequantize(torch.float32).double()
    rows = x.double().split(counts)
    matmuls = [part @ matrix.t() for part, matrix in zip(rows, dense, strict=False)]
    return torch.cat([*matmuls, torch.zeros(counts[-1], w.shape[1], dtype=torch.float64)])


def near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (out.shape, out.dtype) == (wanted.shape, torch.float16)
    assert (out.double() - wanted).norm() <= 5e-4 * wanted.norm()


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_grouped_linear(spec):
    """Experts without rows, rows without an expert, tiles of one that end where another's begin."""
    w = weight(spec)
    for seed, (counts, splits) in enumerate(COUNTS):
        x = gaussian((sum(counts), SHAPE[2]), seed=seed).half()
        x[sum(counts[:-1]) :] = torch.nan
        ends = torch.tensor(counts[:-1]).cumsum(0).to(torch.int32)
        setting = LaunchConfig(TILE_CONFIGS[0], splits)
        out = experts.launch(x, *arguments(w, ends), setting=setting)
        near(out, expected(x.nan_to_num(), w, counts))
        assert not out[sum(counts[:-1]) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("config", TILE_CONFIGS, ids=str)
def test_every_regime(config):
    w, counts = weight(SPECS[1]), (70, 0, 65, 20)
    x = gaussian((sum(counts), SHAPE[2])).half()
    ends = torch.tensor(counts[:-1]).cumsum(0).to(torch.int32)
    near(
        experts.launch(x, *arguments(w, ends), setting=LaunchConfig(config, 1)),
        expected(x, w, counts),
    )


def test_bits_of_each_expert_alone():
    """Which rows stand beside a row, and whose the others are, changes nothing."""
    w, counts = weight(SPECS[1], SMALL), (3, 17, 0)
    x = gaussian((sum(counts), SMALL[2])).half()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    out = kernel("grouped_linear", w)(x, w, ends)
    for rows, part, own in zip(x.split(counts), out.split(counts), w, strict=True):
        assert torch.equal(kernel("linear", own)(rows, own, None), part)


def test_a_batch_of_any_stride():
    w = weight(SPECS[1], SMALL)
    x = gaussian((3, 2, 150)).half()
    linear = kernel("grouped_linear", w)
    out = linear(x, w, None)
    near(out.reshape(6, 16), expected(x.reshape(6, 150), w, (2, 2, 2, 0)))
    wider = torch.cat([x, x], -1)[..., :150]
    assert torch.equal(linear(wider, w, None), out)
    assert linear(x[:, :0], w, None).shape == (3, 0, 16)
    rows = x.reshape(6, 150).t().contiguous().t()
    ends = torch.tensor([2, 2, 4, 4, 6, 6], dtype=torch.int32)[1::2]
    assert torch.equal(linear(rows, w, ends), out.reshape(6, 16))


def test_what_is_not_finite_stays_with_its_expert():
    w = weight(SPECS[1], SMALL)
    w.scale[2] = torch.nan
    x = gaussian((5, 150)).half()
    x[1, 149] = torch.nan
    out = kernel("grouped_linear", w)(x, w, torch.tensor([2, 3, 4], dtype=torch.int32))
    assert out.isnan().any(-1).tolist() == [False, True, False, True, False]


@triton.jit
def places(offs_ptr, out_ptr, M, experts, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    row, end, expert = find(offs_ptr, tl.program_id(0), M, experts, ROWS, GROUPS)
    at = out_ptr + 3 * tl.program_id(0)
    tl.store(at, row)
    tl.store(at + 1, end)
    tl.store(at + 2, expert)


def tiles_of(ends: list[int], m: int, rows: int) -> list[list[int]]:
    """(first row, end, expert) of each tile that is launched."""
    launched = experts.most_m_tiles(m, len(ends), rows)
    out = torch.empty(launched, 3, dtype=torch.int32)
    offs = torch.tensor(ends, dtype=torch.int32)
    places[(launched,)](offs, out, m, len(ends), rows, experts.groups_of(len(ends)))
    return out.tolist()


@pytest.mark.parametrize(
    "counts", [(0,), (5, 0), (4, 4, 4, 4), (1, 0, 1, 1, 9), (0, 0, 0, 17), (1, 1, 1, 1, 1, 0, 2)]
)
def test_every_row_has_one_place(counts):
    """The tiles launched suffice: each row is in one of them, with its expert."""
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    ends = torch.tensor(counts[:-1]).cumsum(0).tolist() or [0]
    found = [
        (row, expert)
        for first, end, expert in tiles_of(ends, len(owners), 4)
        for row in range(first, min(first + 4, end))
    ]
    assert found == list(enumerate(owners))


@pytest.mark.parametrize("ends", [[2, 100], [-5, 3], [3, 1], [-(2**31), 2**31 - 1]], ids=str)
def test_rows_stay_in_bounds_whatever_offsets_say(ends):
    found = tiles_of(ends, 3, 2)
    assert all(first >= 0 and end <= 3 for first, end, _ in found)


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_dequantize(spec):
    """Bit for bit what the reference gives."""
    shape = (2, 140, 150)
    w = weight(spec, shape)
    dense = kernel("dequantize", w)(w.parts, w.spec, shape, torch.float16)
    assert torch.equal(dense, w.canonical().dequantize(torch.float16))


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_custom_ops(spec):
    """Schema, fake implementations and registration, for `torch.compile`."""
    w = weight(spec, (2, 16, 70))
    x, offs = gaussian((5, 70)).half(), torch.tensor([3, 5], dtype=torch.int32)
    parts = (*arguments(w, offs)[:4], *arguments(w, offs)[5:9])
    for op, args in (
        (torch.ops.ao_kernels.plane16_grouped_linear, (x, *arguments(w, offs))),
        (torch.ops.ao_kernels.plane16_dequantize, (*parts, torch.float32)),
    ):
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, results


def test_compiled_in_one_graph():
    w, offs = weight(SPECS[0], (2, 16, 70)), torch.tensor([3, 5], dtype=torch.int32)
    linear = kernel("grouped_linear", w)
    x = gaussian((5, 70)).half()
    compiled = torch.compile(lambda x, offs: linear(x, w, offs), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, offs), linear(x, w, offs))
