"""The layouts `cpu_tiles` and `cpu_tiles8`, against a literal version of their definition."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_core import WHOLE, QTensor, Spec, int_dtype, lut_dtype, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.numerics import expand, full_block, unpack_bits
from ao_core.testing.base import same_bits
from ao_core.testing.layout_values import same_parts
from ao_core.testing.warm import run_python
from ao_kernels.cpu.codes import codes_of

DTYPES = [dtype for dtype in registry.dtypes.values() if dtype.kind not in ("codebook", "dense")]
SCALES = ("float32", "bfloat16", "float16", "e8m0", "e4m3")
E4M3 = Spec("f8e4m3", (WHOLE, WHOLE))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layouts_of(name: str) -> tuple[str, str]:
    """The canonical layout of a number format and the one in tiles."""
    return (
        ("plain", "cpu_tiles8") if registry.dtypes.get(name).bits == 8 else ("packed", "cpu_tiles")
    )


def both(spec: Spec, shape: tuple[int, ...]) -> tuple[QTensor, QTensor]:
    """A weight in the canonical layout and in tiles."""
    canonical, tiles = layouts_of(spec.dtype)
    fields = {**spec.__dict__, "layout": canonical}
    q = quantize_tensor(randn(*shape), Spec(**fields))
    return q, to_layout(q, tiles)


# -- the definition, byte by byte ------------------------------------------------------------------


def tile_bytes(codes: list[list[int]], bits: int) -> bytes:
    """The planes of one tile: 16 rows of 16 stored codes."""
    out = b""
    if bits == 8:
        return bytes(codes[r][4 * i + b] for i in range(4) for r in range(16) for b in range(4))
    low = 0  # lowest bit of the codes that the next plane holds
    if bits & 4:
        out += bytes(
            (codes[r][8 * v + b] & 15) | (codes[r][8 * v + 4 + b] & 15) << 4
            for v in range(2)
            for r in range(16)
            for b in range(4)
        )
        low = 4
    if bits & 2:
        out += bytes(
            sum((codes[r][4 * i + b] >> low & 3) << 2 * i for i in range(4))
            for r in range(16)
            for b in range(4)
        )
        low += 2
    if bits & 1:
        first = [4 * j if j < 4 else 4 * (j - 4) + 1 for j in range(8)]
        out += bytes(
            sum((codes[r][first[j] + 2 * h] >> low & 1) << j for j in range(8))
            for r in range(16)
            for h in range(2)
        )
    return out


def qdata_of(codes: list[list[int]], bits: int, group: int) -> Tensor:
    """All tiles of a matrix of stored codes."""
    n, k = len(codes), len(codes[0])
    columns: list[list[int | None]] = []
    for start in range(0, k, group):
        inside = range(start, min(start + group, k))
        columns += [
            [c if c in inside else None for c in range(at, at + 16)]
            for at in range(start, inside.stop, 16)
        ]
    tiles = [
        [
            tile_bytes(
                [
                    [0 if c is None or r >= n else codes[r][c] for c in tile]
                    for r in range(top, top + 16)
                ],
                bits,
            )
            for tile in columns
        ]
        for top in range(0, n, 16)
    ]
    return torch.tensor([[list(tile) for tile in row] for row in tiles], dtype=torch.uint8)


def rows_of(grid: Tensor, spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """(…, row blocks, groups, 16) of a grid's values, zeros beyond the last row."""
    n, groups = shape[-2], grid.shape[-1]
    raw = grid.view(torch.uint8) if grid.element_size() == 1 else grid
    block = full_block(spec.block, shape)
    rows = expand(raw, (*shape[:-1], groups), (*block[:-1], 1)).expand(*shape[:-1], groups)
    out = raw.new_zeros(*shape[:-2], -(-n // 16), groups, 16)
    for r in range(n):
        out[..., r // 16, :, r % 16] = rows[..., r, :]
    return out.view(grid.dtype)


def check_parts(q: QTensor, t: QTensor) -> None:
    """Every part in tiles is what the definition makes of the canonical parts."""
    shape, spec, codes = tuple(q.shape), q.spec, codes_of(q.format)
    k = shape[-1]
    stored = unpack_bits(q.qdata.view(torch.uint8), codes.bits, k) ^ codes.flip
    group = full_block(spec.block, shape)[-1]
    matrices = stored.reshape(-1, *shape[-2:]).tolist()
    expected = torch.stack([qdata_of(matrix, codes.bits, group) for matrix in matrices])
    assert same_bits(t.qdata, expected.reshape(*shape[:-2], *expected.shape[1:]))
    names = {"qdata", "table", "scale"}
    values = torch.tensor(codes.values).expand(*shape[:-2], -1)
    assert same_bits(t.table.view(torch.float32), values.contiguous())
    scale = q.scale
    if isinstance(scale, QTensor):  # one scale for all of these
        names.add("scale_outer")
        outer = scale.scale.expand(*shape[:-2], 1, 1)
        assert same_bits(t.scale_outer, rows_of(outer, Spec("int4", shape[-2:]), shape))
        scale = scale.qdata
    assert same_bits(t.scale, rows_of(scale, spec, shape))
    if spec.zero_point != "none":
        names.add("zero_point")
        assert same_bits(t.zero_point, rows_of(q.zero_point, spec, shape))
    if spec.act is not None and spec.act.zero_point != "none":
        names.add("rowsum")
        sums = q.dequantize(torch.float64).sum(-1)
        padded = torch.nn.functional.pad(sums, (0, -shape[-2] % 16))
        torch.testing.assert_close(t.rowsum.double(), padded, rtol=1e-5, atol=1e-5)
        assert t.rowsum.dtype == torch.float32
    assert set(t.part_names) == names
    assert same_parts(t.canonical(), q)
    assert same_parts(to_layout(t.canonical(), t.spec.layout), t)


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (33, 70), (17, 31), (3, 18, 40)], ids=str)
@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
def test_every_format(name: str, shape: tuple[int, ...]) -> None:
    check_parts(*both(Spec(name, (1, 32), "bfloat16"), shape))


@pytest.mark.parametrize(
    "block",
    [(1, 16), (16,), (1, 24), (1, 32), (1, 64), (1, 128), (1, WHOLE), (4, 32), (5, 48), (WHOLE, 32),
     (WHOLE, WHOLE), (2, 4, 64), (WHOLE, 1, 32), (WHOLE, WHOLE, WHOLE)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(37, 144), (3, 18, 120)], ids=str)
def test_every_block(shape: tuple[int, ...], block: tuple[int, ...]) -> None:
    for name in ("int4", "nf4", "int3", "int8"):
        check_parts(*both(Spec(name, block), shape))


@pytest.mark.parametrize("shape", [(18, 70), (2, 18, 70)], ids=str)
@pytest.mark.parametrize("zero_point", ["none", "int", "float"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_and_zero_point(scale: str, zero_point: str, shape: tuple[int, ...]) -> None:
    for name in ("uint4", "int2", "int8", "uint5"):
        check_parts(*both(Spec(name, (1, 32), scale, zero_point), shape))


@pytest.mark.parametrize("block", [(WHOLE, WHOLE), (WHOLE, WHOLE, WHOLE)], ids=str)
@pytest.mark.parametrize("shape", [(18, 70), (3, 18, 70)], ids=str)
def test_quantized_scales(shape: tuple[int, ...], block: tuple[int, ...]) -> None:
    for name in ("f4e2m1", "nf4", "int8"):
        check_parts(*both(Spec(name, (1, 16), Spec("f8e4m3", block)), shape))


@pytest.mark.parametrize("shape", [(18, 70), (3, 18, 70)], ids=str)
def test_sums_of_rows_for_zero_points_of_activations(shape: tuple[int, ...]) -> None:
    act = Spec("uint8", (1, WHOLE), zero_point="int")
    for name, zero_point in (
        ("int4", "none"),
        ("uint4", "int"),
        ("ternary", "none"),
        ("int8", "none"),
    ):
        check_parts(*both(Spec(name, (1, 32), "bfloat16", zero_point, act=act), shape))


def test_bits_of_special_scales_survive() -> None:
    q, _ = both(Spec("int4", (1, 32)), (18, 64))
    q.scale.copy_(torch.tensor([torch.nan, -torch.inf, -0.0, 1e-45]).repeat(9).reshape(18, 2))
    q.scale.view(torch.int32)[3, 1] = 0x7FA00001  # a signalling NaN with a payload
    assert same_parts(to_layout(q, "cpu_tiles").canonical(), q)


def test_parts_of_a_larger_weight_are_taken_as_they_lie() -> None:
    q, _ = both(Spec("int4", (1, 32), "bfloat16"), (32, 128))
    piece = q[8:24, 32:96]
    assert not piece.qdata.is_contiguous()
    t = to_layout(piece, "cpu_tiles")
    assert torch.equal(t.dequantize(), piece.dequantize())


def test_conversion_does_not_share_memory() -> None:
    q, t = both(Spec("int4", (1, WHOLE)), (32, 64))
    before = q.dequantize()
    for part in t.parts.values():
        part.zero_()
    assert torch.equal(q.dequantize(), before)
    q, t = both(Spec("int4", (1, WHOLE)), (32, 64))
    for part in t.canonical().parts.values():
        part.zero_()
    assert torch.equal(t.dequantize(), before)


def test_traced_conversion_has_the_same_shapes() -> None:
    for spec in (
        Spec("uint3", (1, 24), "float16", "int"),
        Spec("nf4", (1, 16), E4M3),
        Spec("int8", (1, WHOLE), act=Spec("uint8", (1, WHOLE), zero_point="int")),
    ):
        q, t = both(spec, (33, 72))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = q.map_leaves(mode.from_tensor)
            converted = to_layout(fake, t.spec.layout)
            again = converted.canonical()
        for real, traced in ((t, converted), (q, again)):
            meta = [[(n, p.shape, p.dtype) for n, p in w.leaves()] for w in (real, traced)]
            assert meta[0] == meta[1]


# -- formats ---------------------------------------------------------------------------------------


def test_stored_codes_of_integers_count_from_the_least_value() -> None:
    for bits in range(1, 9):
        for signed in (True, False):
            dtype = int_dtype(f"i{bits}", bits, signed)
            codes = codes_of(dtype)
            assert codes.values == tuple(range(int(dtype.min), int(dtype.max) + 1))
            assert codes.kind == 1
            assert codes.are_integers
    ternary = codes_of(registry.dtypes.get("ternary"))
    assert (ternary.values, ternary.kind, ternary.are_integers) == ((-1, 0, 1, 1), 0, True)


def test_kinds_of_tables() -> None:
    others = [dtype for dtype in DTYPES if dtype.kind != "int"]
    kinds = {dtype.name: codes_of(dtype).kind for dtype in others}
    # bytes of floats are the upper ones of float16, where LUTs are looked up
    floats = {dtype.name for dtype in others if dtype.kind == "float" and dtype.bits == 8}
    assert kinds == {dtype.name: 2 if dtype.name in floats else 0 for dtype in others}
    few = codes_of(lut_dtype("few", [-2, -0.5, 0, 1, 4]))
    assert (few.bits, few.kind, few.flip, few.are_integers) == (3, 0, 0, False)
    assert few.values == (-2, -0.5, 0, 1, 4, 4, 4, 4)
    steep = codes_of(lut_dtype("steep", [0, 100, 400, 1000]))
    assert not steep.are_integers


# -- what fits, and what is chosen -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "reason"),
    [
        (Spec("int8", (1, 32)), (16, 64), "holds codes of 1 to 7 bits, and int8 has 8"),
        (Spec("int4", (1, 32)), (16, 0), "not empty, found (16, 0)"),
        (Spec("int4", (32,)), (64,), "2 or 3 dimensions"),
        (Spec("int4", (1, 3)), (2, 3, 3, 3), "2 or 3 dimensions"),
        (Spec("int4", (1, 8)), (16, 64), "groups of 8"),
        (Spec("ternary", (1, 32), zero_point="int"), (16, 64), "count up by 1, not of ternary"),
        (Spec("nf4", (1, 32), Spec("nf4", (1, WHOLE))), (16, 64), "as integers or f8e4m3"),
        (
            Spec("int4", (1, 32), act=Spec("int8", (WHOLE, WHOLE), static=True)),
            (2, 16, 64),
            "static scales of the activations of each expert",
        ),
    ],
    ids=str,
)
def test_reasons(spec: Spec, shape: tuple[int, ...], reason: str) -> None:
    found = registry.layouts.get("cpu_tiles").refuses(spec, shape, registry.dtypes.get(spec.dtype))
    assert found is not None
    assert reason in found


def test_padding_is_bounded() -> None:
    dtype, refuses = registry.dtypes.get("int4"), registry.layouts.get("cpu_tiles").refuses
    for group in range(1, 130):
        for k in (16, 63, 64, 65, 130, 1000):
            reason = refuses(Spec("int4", (1, group)), (16, k), dtype)
            size = min(group, k)
            padded = sum(-(-min(size, k - at) // 16) * 16 for at in range(0, k, size))
            assert (reason is None) == (k < 64 or padded <= k * 4 / 3), (group, k)


PROGRAM = """
import json, torch
from torch import nn
from ao_core import WeightOnlyConfig, explain, quantize_
from ao_core.ext import to_layout
model = nn.Sequential(nn.Linear(128, 32)).bfloat16()
quantize_(model, WeightOnlyConfig("uint4", 32, "bfloat16", "int"))
w, x = model[0].weight, torch.ones(2, 128).bfloat16()
reason = ""
if not w.spec.layout.startswith("cpu_tiles"):
    try:
        to_layout(w.canonical(), "cpu_tiles")
    except RuntimeError as error:
        reason = str(error)
difference = (model(x) - nn.functional.linear(x, w.dequantize(), model[0].bias)).abs().max()
print(json.dumps([w.spec.layout, float(difference), str(explain(model)), reason]))
"""


def outcome(**env: str) -> tuple[str, float, str, str]:
    done = run_python("-c", PROGRAM, env={**os.environ, **env}, check=True)
    layout, difference, text, reason = json.loads(done.stdout)
    return layout, difference, text, reason


@pytest.mark.slow
def test_chosen_by_itself_where_the_library_loads() -> None:
    layout, difference, text, _ = outcome()
    assert layout == "cpu_tiles"
    assert difference < 0.02
    assert "→ cpu_tiles_linear (ao-kernels, priority 50)" in text
    layout, difference, _, _ = outcome(AO_KERNELS="reference")
    assert (layout, difference) == ("packed", 0)


@pytest.mark.slow
def test_left_to_others_where_the_library_does_not_load() -> None:
    layout, difference, _, reason = outcome(AO_CPU_LIBRARY="nowhere.so")
    assert layout == "int4_cpu"
    assert difference < 0.02
    assert "there is no file nowhere.so" in reason
