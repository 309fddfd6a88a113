"""The kernels quantize, dequantize and error_sums: bit for bit as the reference, whatever the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_core import WHOLE, Call, QTensor, Spec, lut_dtype, quantize_tensor, register, reopen
from ao_core.ext import registry
from ao_core.ext.kernels import candidates, decode_reference, encode_reference, select
from ao_core.ext.numerics import error_sums, expand
from ao_core.testing import KernelSuite
from ao_core.testing.base import same_bits
from ao_core.testing.kernel_codecs import CODEC_SPECS, contents
from ao_kernels.cpu.quantize import CODE_KERNELS, Matrix, matrix_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: formats that have values of their own, 0 among them
NAMES = [
    d.name for d in registry.dtypes.values() if d.kind not in ("codebook", "dense") and d.min <= 0
]
NESTED = Spec("f8e4m3", (WHOLE, WHOLE))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def serving(op: str, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The function of the kernel under test, which surely serves the call."""
    kernel = select(Call(op, spec, shape, shape, dtype, "cpu"))
    assert kernel.name == f"cpu_{op}_{spec.layout}"
    return kernel.fn


def check(x: Tensor, spec: Spec) -> None:
    """Quantize and dequantize `x`: the parts and the values of the reference."""
    shape = tuple(x.shape)
    parts = serving("quantize", spec, shape, x.dtype)(x, spec)
    expected = encode_reference(x, spec)
    found, wanted = (dict(QTensor(p, spec, shape, x.dtype).leaves()) for p in (parts, expected))
    assert list(found) == list(wanted)
    for name, part in wanted.items():
        assert same_bits(part, found[name]), f"{name} of {shape} {x.dtype} as {spec}"
    for dtype in DTYPES:
        values = serving("dequantize", spec, shape, dtype)(parts, spec, shape, dtype)
        assert same_bits(values, decode_reference(expected, spec, shape, dtype)), spec


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Spec]:
    """A tensor with finite values of every size, and a spec with blocks that the kernels take."""
    name = draw(st.sampled_from(NAMES))
    kind = registry.dtypes.get(name).kind
    extent = st.sampled_from([1, 2, 3, 5, 8, 16, 31, 32, 64, WHOLE])
    layout = draw(st.sampled_from(["plain", "packed", "flat"]))
    zero_point = draw(st.sampled_from(["none", "float", *(["int"] if kind == "int" else [])]))
    scales = [
        "float32",
        "bfloat16",
        "float16",
        "e8m0",
        "e4m3",
        *([NESTED] if zero_point == "none" else []),
    ]
    rows = 1 if layout == "flat" else draw(st.sampled_from([1, 1, 2, 16, WHOLE]))
    block = (rows, draw(st.sampled_from([8, 32, WHOLE]) if rows != 1 else extent))
    if layout == "flat":
        block = block[1:]
    mode = ("mx_mode", draw(st.sampled_from(["floor", "ceil", "even", "rceil"])))
    spec = Spec(name, block, draw(st.sampled_from(scales)), zero_point, layout, options=(mode,))
    lead = draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))
    shape = (*lead, draw(st.integers(1 if rows == 1 else 8, 70)))
    dtype = draw(st.sampled_from(DTYPES))
    content = draw(st.sampled_from(["gaussian", "ties", "range"]))
    return contents(content, spec, shape, dtype, draw(st.integers(0, 99))), spec


@given(calls())
def test_any_call(call: tuple[Tensor, Spec]) -> None:
    check(*call)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16", "e8m0", "e4m3"])
def test_blocks_of_every_magnitude(name: str, scale: str) -> None:
    """Numbers from all over bfloat16, those next to each other in one block, or far apart."""
    x = torch.arange(0, 1 << 16, 5, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    x = x[: x.numel() // 32 * 32].reshape(-1, 32)
    check(x, Spec(name, (1, 32), scale, "none", "packed"))
    check(x.t().contiguous(), Spec(name, (1, 12), scale, "float", "plain"))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((3, 200_000), (1, WHOLE)),  # rows that several threads share
        ((70, 4000), (WHOLE, WHOLE)),
        ((300_001,), (WHOLE,)),
        ((300_001,), (100_000,)),
        ((2, 130, 1030), (64, 512)),
        ((2, 130, 1030), (WHOLE, WHOLE)),
        ((9, 3, 5, 5), (1, WHOLE, WHOLE, WHOLE)),
        ((9, 3, 5, 8), (4, WHOLE, WHOLE, WHOLE)),
        ((2, 3, 4, 40), (1, 2, WHOLE, WHOLE)),
        ((40, 9), (8, WHOLE)),
        ((1, 17), (16, 16)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "spec", [Spec("int3", (1,), "bfloat16", layout="packed"), Spec("uint8", (1,), zero_point="int")]
)
def test_blocks(shape: tuple[int, ...], block: tuple[int, ...], spec: Spec) -> None:
    spec = replace(spec, block=block)
    call = Call("quantize", spec, shape, shape, torch.bfloat16, "cpu")
    if select(call).name.startswith("reference"):
        found = {c.kernel.name: c.refusal for c in candidates(call)}
        assert "blocks" in str(found[f"cpu_quantize_{spec.layout}"])
        assert spec.layout == "packed"  # whose rows are padded to whole bytes
    else:
        check(randn(*shape, dtype=torch.bfloat16), spec)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
extents = st.lists(st.sampled_from([1, 2, 3, 4, WHOLE]), min_size=1, max_size=5).map(tuple)


@given(shapes, extents, st.sampled_from(["plain", "packed"]))
def test_matrices_have_the_blocks_of_the_tensor(
    shape: tuple[int, ...], block: tuple[int, ...], layout: str
) -> None:
    """The block of each element, counted in the matrices, is the one that `expand` gives it."""
    spec, dtype = Spec("int3", block, layout=layout), registry.dtypes.get("int3")
    matrix = matrix_of(spec, shape, dtype)
    if matrix is None:
        assert len(shape) > 2 or layout == "packed"
        return
    rows = torch.arange(torch.Size(shape).numel()).reshape(-1, matrix.n, matrix.k)
    bands, groups = -(-matrix.n // matrix.block_n), -(-matrix.k // matrix.block_k)
    matrices = torch.arange(rows.shape[0])[:, None, None] * bands
    band = (matrices + torch.arange(matrix.n)[:, None] // matrix.block_n) * groups
    mine = (band + torch.arange(matrix.k) // matrix.block_k).reshape(shape)
    whole = [
        1 if e == WHOLE else -(-n // e) for n, e in zip(shape, _aligned(block, shape), strict=True)
    ]
    grid = torch.arange(torch.Size(whole).numel()).reshape(whole)
    assert torch.equal(mine, expand(grid, shape, block).expand(shape))


def _aligned(block: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """As `full_block`, but with `WHOLE` left as it is."""
    extents = ([1] * len(shape) + list(block))[-len(shape) :]
    return [e if e == WHOLE else min(e, n) for e, n in zip(extents, shape, strict=True)]


def test_matrices() -> None:
    int4, int8 = (registry.dtypes.get(name) for name in ("int4", "int8"))
    assert matrix_of(Spec("int4", (1, 32), layout="packed"), (6, 96), int4) == Matrix(6, 96, 1, 32)
    assert matrix_of(Spec("int8", (1, WHOLE)), (6, 96), int8) == Matrix(6, 96, 1, 96)
    assert matrix_of(Spec("int8", (WHOLE, WHOLE)), (6, 96), int8) == Matrix(1, 576, 1, 576)
    assert matrix_of(Spec("int4", (256,), layout="flat"), (6, 96), int4) == Matrix(1, 576, 1, 256)
    assert matrix_of(Spec("int4", (2, 1, 8)), (4, 4, 16), int4) is None


@pytest.mark.parametrize("layout", ["plain", "flat"])
def test_formats_of_others(layout: str) -> None:
    if registry.dtypes.local("squares") is None:
        reopen()
        values = {(abs(i) / 127) ** 2 * (1 if i > 0 else -1) for i in range(-127, 128)}
        register(lut_dtype("squares", sorted(values)))
    block = (256,) if layout == "flat" else (1, 64)
    check(randn(33, 70), Spec("squares", block, layout=layout))


@pytest.mark.parametrize("layout", ["plain", "packed", "flat"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_sums(layout: str, dtype: torch.dtype) -> None:
    for shape in ((90, 1000), (3, 70, 33), (100_000,), (5, 3, 3, 3)):
        block = (32,) if layout == "flat" else (1, 32)
        q = quantize_tensor(randn(*shape, dtype=dtype), Spec("int4", block, layout=layout))
        x = randn(*shape, dtype=torch.float32)
        for step in (1, 2, 7):
            for dense in (x.to(dtype), x):
                sums = serving("error_sums", q.spec, shape, dense.dtype)(dense, q, step)
                expected = error_sums(dense[::step], q.dequantize()[::step])
                torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0.0)


def test_same_bits_for_any_number_of_threads() -> None:
    x, before = randn(200, 1000), torch.get_num_threads()
    specs = (
        Spec("int4", (1, 32), layout="packed"),
        Spec("int8", (WHOLE, WHOLE)),
        Spec("nf4", (64,), layout="flat"),
    )
    try:
        for spec in specs:
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                q = quantize_tensor(x, spec)
                sums = serving("error_sums", spec, tuple(x.shape), x.dtype)(x, q, 1)
                results.append((*q.parts.values(), q.dequantize(), sums))
            for other in results[1:]:
                assert all(map(same_bits, results[0], other))
    finally:
        torch.set_num_threads(before)


def test_strided_and_wide_inputs() -> None:
    """A transposed tensor is copied; float64 is left to the reference, which gives the same codes."""
    spec = Spec("int4", (1, 32), layout="packed")
    x = randn(64, 40)
    for dense in (x.t(), torch.nn.Parameter(x).t(), x.double()):
        parts = quantize_tensor(dense, spec).parts
        assert all(
            same_bits(parts[n], p) for n, p in encode_reference(dense.detach(), spec).items()
        )


def test_traced_tensors_are_left_to_torch() -> None:
    spec = Spec("int4", (1, 32), layout="packed")
    with FakeTensorMode():
        q = quantize_tensor(torch.randn(6, 64), spec)
        assert (q.qdata.shape, q.dequantize().shape) == ((6, 32), (6, 64))


def test_formats_without_zero_are_refused() -> None:
    """Their blocks of zeros have the least scale, which only the reference gives."""
    if "positive" not in registry.dtypes:
        register(lut_dtype("positive", (0.25, 0.5, 1.0)))
    spec, shape = Spec("positive", (1, 32)), (4, 64)
    call = Call("quantize", spec, shape, shape, torch.float32, "cpu")
    refusals = {c.kernel.name: c.refusal for c in candidates(call)}
    assert "a format that has 0" in str(refusals["cpu_quantize_plain"])
    x = torch.zeros(shape)
    assert float(quantize_tensor(x, spec).dequantize().abs().max()) < 1e-38


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "reason"),
    [
        (Spec("int4", (1, 32)), (4, 64), torch.float64, "float64"),
        (Spec("int4", (1, 32)), (0, 64), torch.float32, "not empty"),
        (Spec("int4", (2, 1, 8)), (4, 4, 16), torch.float32, "blocks"),
        (Spec("int4", (16, 2)), (64, 64), torch.float32, "blocks"),
        (Spec("uint4", (1, 32), NESTED, "int"), (4, 64), torch.float32, "zero points"),
    ],
    ids=str,
)
def test_reasons(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    call = Call("quantize", spec, shape, shape, dtype, "cpu")
    refusals = {c.kernel.name: c.refusal for c in candidates(call)}
    assert reason in str(refusals["cpu_quantize_plain"])
    assert select(call).name == "reference_quantize"


# -- the suite over a part of its cases: the tests above have many more -----------------------------


class Conversions(KernelSuite):
    """Every kind of spec, once in a shape that no block divides."""

    specs = CODEC_SPECS
    shapes = ((33, 70), (4, 3, 3, 2))
    dtypes = (torch.bfloat16,)


for _kernel in CODE_KERNELS:
    _name = f"Test{_kernel.name.title().replace('_', '')}"
    globals()[_name] = type(_name, (Conversions,), {"kernel": _kernel.name})
