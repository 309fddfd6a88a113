"""Matmuls with weights in tiles: how exact they are, for every format, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, QTensor, Spec, lut_dtype, quantize_tensor, register, reopen
from ao_core.ext import fake_quantize, registry, to_layout
from ao_core.ext.kernels import select

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
NAMES = [
    dtype.name for dtype in registry.dtypes.values() if dtype.kind not in ("codebook", "dense")
]
INTEGERS = [name for name in NAMES if registry.dtypes.get(name).kind == "int"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: rows of activations: one vector, each way to use registers, and more than a block of them
ROWS = (1, 2, 3, 4, 5, 7, 16, 65)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def tiled(spec: Spec, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> QTensor:
    """Gaussian values in tiles."""
    whole = registry.dtypes.get(spec.dtype).bits == 8
    q = quantize_tensor(
        randn(*shape).to(dtype), replace(spec, layout="plain" if whole else "packed")
    )
    return to_layout(q, "cpu_tiles8" if whole else "cpu_tiles")


def values_of(w: QTensor) -> Tensor:
    """The exact values of a weight."""
    return w.canonical().dequantize(torch.float32).double()


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def served(x: Tensor, w: QTensor, bias: Tensor | None = None) -> Tensor:
    """The matmul, surely by the kernel under test."""
    call = Call("linear", w.spec, tuple(w.shape), tuple(x.shape), x.dtype, "cpu")
    assert select(call).name == f"{w.spec.layout}_linear"
    return F.linear(x, w, bias)


def check(w: QTensor, rows: tuple[int, ...] = ROWS) -> None:
    """As exact as float32 allows, and in 16 bits as the dense matmul of the values in 16 bits."""
    n, k = w.shape
    values = values_of(w)
    for dtype in DTYPES:
        for m in rows:
            x, bias = randn(m, k, seed=m).to(dtype), randn(n, seed=1).to(dtype)
            for b in (None, bias):
                expected = F.linear(x.double(), values, None if b is None else b.double())
                out = served(x, w, b)
                assert (out.shape, out.dtype) == ((m, n), dtype)
                error = relative(out, expected)
                if dtype == torch.float32:
                    assert error <= 1e-6, (dtype, m, error)
                else:
                    dense = F.linear(x, values.to(dtype), b)
                    # of few results a handful may happen to round the wrong way
                    slack = 1.05 if m * n >= 2048 else 1.5 if m * n < 256 else 1.2
                    assert error <= slack * relative(dense, expected), (dtype, m, error)


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    check(tiled(Spec(name, (1, 32), "bfloat16"), (70, 200)))


@pytest.mark.parametrize("zero_point", ["none", "int", "float"])
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16", "e8m0", "e4m3"])
def test_every_scale_and_zero_point(scale: str, zero_point: str) -> None:
    for name in ("uint4", "int3", "uint8"):
        check(tiled(Spec(name, (1, 64), scale, zero_point), (40, 136)), rows=(1, 4, 33))


def test_zero_points_of_floats() -> None:
    for name in ("nf4", "f8e4m3", "f4e2m1"):
        check(tiled(Spec(name, (1, 64), "bfloat16", "float"), (40, 136)), rows=(1, 4, 33))


@pytest.mark.parametrize("block", [(1, 16), (1, 24), (1, 32), (1, 64), (1, 128), (1, 256), ROW,
                                   (4, 32), (16, 48), (WHOLE, 64), TENSOR], ids=str)  # fmt: skip
def test_every_block(block: tuple[int, ...]) -> None:
    for name in ("int4", "nf4", "int8", "ternary", "f6e3m2"):
        check(tiled(Spec(name, block), (37, 288)), rows=(1, 4, 33))


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (16, 16), (15, 17), (5, 3), (257, 40), (3, 1000)],
                         ids=str)  # fmt: skip
def test_every_shape(shape: tuple[int, int]) -> None:
    for name in ("int4", "uint2", "f8e5m2", "int5"):
        w = tiled(Spec(name, (1, 32)), shape)
        values = values_of(w)
        for m in (0, 1, 3, 17):
            x, bias = randn(m, shape[1]), randn(shape[0])
            out = served(x, w, bias)
            torch.testing.assert_close(
                out.double(), F.linear(x.double(), values, bias.double()), rtol=1e-5, atol=1e-5
            )


def test_quantized_scales() -> None:
    for name in ("f4e2m1", "int4", "f8e4m3"):
        check(tiled(Spec(name, (1, 16), Spec("f8e4m3", TENSOR)), (40, 208)), rows=(1, 4, 33))


def test_long_rows() -> None:
    """Errors of sums do not grow beyond the bound, for the longest rows that models have."""
    for name in ("int4", "int8", "nf4", "f8e4m3"):
        check(tiled(Spec(name, (1, 128), "bfloat16"), (32, 14336)), rows=(1, 8))
    check(tiled(Spec("int8", ROW), (32, 14336)), rows=(1, 8))


def test_the_error_is_measured() -> None:
    """float32 is not exact: were the reference computed by the same code, this would be 0."""
    w = tiled(Spec("int4", (1, 32)), (64, 512))
    x = randn(4, 512)
    assert 1e-9 < relative(served(x, w), x.double() @ values_of(w).t()) < 1e-6


@pytest.mark.parametrize("act", [None, Spec("int8", ROW)], ids=["exact", "dynamic"])
@pytest.mark.parametrize(("m", "k"), [(1200, 96), (400, 14400)], ids=["rows", "bytes"])
def test_rows_do_not_depend_on_how_many_are_computed_at_a_time(
    act: Spec | None, m: int, k: int
) -> None:
    w = tiled(Spec("int4", (1, 32), act=act), (37, k), torch.bfloat16)
    x = randn(m, k).bfloat16()
    parts = [served(part, w) for part in x.split(m // 2 + 1)]
    assert torch.equal(served(x, w), torch.cat(parts))


@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (1, 1), (2, 0, 3), (2, 1, 2, 1)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    w, bias = tiled(Spec("int4", (1, 32)), (33, 70)), randn(33)
    x = randn(*lead, 70)
    out = served(x, w, bias)
    assert out.shape == (*lead, 33)
    torch.testing.assert_close(out, F.linear(x, values_of(w).float(), bias), rtol=1e-4, atol=1e-5)


def test_strided_activations_and_bias() -> None:
    w = tiled(Spec("int4", (1, 32)), (33, 70))
    x, bias = randn(70, 9).t(), randn(66)[::2]
    assert torch.equal(served(x, w, bias), served(x.contiguous(), w, bias.contiguous()))
    wide = randn(9, 100)[:, 7:77]
    assert torch.equal(served(wide, w), served(wide.contiguous(), w))
    repeated = randn(1, 70).expand(9, 70)
    assert torch.equal(served(repeated, w), served(repeated.contiguous(), w))


def test_special_values_stay_in_their_rows() -> None:
    for spec in (
        Spec("int4", (1, 32)),
        Spec("uint4", (1, 32), zero_point="int"),
        Spec("int8", ROW),
    ):
        w = tiled(spec, (40, 70))
        for m in (3, 20):
            x = randn(m, 70)
            clean = served(x, w)
            for special in (torch.nan, torch.inf, -torch.inf):
                dirty = x.clone()
                dirty[1, 69] = special
                out = served(dirty, w)
                assert not out[1][values_of(w)[:, 69] != 0].isfinite().any()
                others = [row for row in range(m) if row != 1]
                assert torch.equal(out[others], clean[others])


def test_values_at_the_ends_of_the_range() -> None:
    """Scales and activations so small, or so large, that only their product is an ordinary number."""
    for small in (2.0**-100, 2.0**100):
        q = quantize_tensor(randn(40, 64) * small, Spec("int4", (1, 32), layout="packed"))
        w, x = to_layout(q, "cpu_tiles"), randn(5, 64) / small
        assert relative(served(x, w), x.double() @ values_of(w).t()) < 1e-6


def test_half_overflows_where_dense_does() -> None:
    w = tiled(Spec("int8", ROW), (40, 64))
    x = (randn(5, 64) * 10000).half()
    dense = F.linear(x.float(), values_of(w).float()).half()
    out = served(x, w)
    near = dense.abs() > 60000  # rounding decides
    assert bool(dense.isinf().any())
    assert torch.equal(out[~near].isinf(), dense[~near].isinf())


@pytest.mark.parametrize("size", [1, 16, 64, 256, 1024, 1e4, 1e6, 1e12])
@pytest.mark.parametrize("count", [1, 8])
def test_outliers_do_not_cost_the_others(count: int, size: float) -> None:
    """Some columns far above the others, as language models have: results without them are as exact."""
    for spec in (Spec("int4", (1, 128)), Spec("nf4", (1, 64)), Spec("int8", ROW)):
        dense = randn(512, 640)
        dense[:, 37 : 37 + count] = 0
        whole = spec.dtype == "int8"
        q = quantize_tensor(dense, replace(spec, layout="plain" if whole else "packed"))
        w = to_layout(q, "cpu_tiles8" if whole else "cpu_tiles")
        values = values_of(w)
        for m in (1, 3, 20):
            x = randn(m, 640)
            x[:, 37 : 37 + count] *= size
            assert relative(served(x, w), x.double() @ values.t()) <= 3e-6, m
            x = x.bfloat16()
            expected = x.double() @ values.t()
            bound = 2 * relative(F.linear(x, values.bfloat16()), expected)
            assert relative(served(x, w), expected) <= bound, m


@pytest.mark.parametrize("powers", [1.0, 2.0, 4.0, 8.0])
def test_activations_of_all_sizes(powers: float) -> None:
    """Standard deviations of their logarithms up to those that no fixed point numbers hold."""
    for name, block in (("int4", (1, 32)), ("uint4", (1, 128)), ("nf4", (1, 64)), ("int8", ROW)):
        zero_point = "int" if name == "uint4" else "none"
        w = tiled(Spec(name, block, "bfloat16", zero_point), (96, 1000))
        values = values_of(w)
        x = randn(1, 1000) * torch.exp2(powers * randn(1, 1000, seed=1))
        assert relative(served(x, w), x.double() @ values.t()) <= 3e-6, name
        x = x.bfloat16()
        expected = x.double() @ values.t()
        bound = 2 * relative(F.linear(x, values.bfloat16()), expected)
        assert relative(served(x, w), expected) <= bound, name


# -- activations quantized at run time ---------------------------------------------------------------


ACTS = {
    "int8": Spec("int8", ROW),
    "uint8": Spec("uint8", ROW, zero_point="int"),
    "f8e4m3": Spec("f8e4m3", ROW),
    "f8e5m2": Spec("f8e5m2", ROW),
}


def dynamic_cases() -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    for act in ACTS:
        names = NAMES if act.startswith("f8") else INTEGERS
        for name in names:
            yield act, name, "none", (1, 32)
        for name in ("uint4", "uint8", "int4"):
            for zero_point in ("none", "int", "float"):
                for block in ((1, 32), (1, 128), ROW, (4, 48)):
                    yield act, name, zero_point, block


@pytest.mark.parametrize(("act", "name", "zero_point", "block"), list(dynamic_cases()), ids=str)
def test_dynamic(act: str, name: str, zero_point: str, block: tuple[int, ...]) -> None:
    w = tiled(Spec(name, block, "bfloat16", zero_point, act=ACTS[act]), (40, 200))
    values = values_of(w)
    for dtype in DTYPES:
        for m in (1, 3, 5, 40):
            x = (randn(m, 200, seed=m) * torch.linspace(0.1, 10, m)[:, None] + 0.5).to(dtype)
            seen = fake_quantize(x.float(), ACTS[act]).double()
            bias = randn(40).to(dtype)
            error = relative(served(x, w, bias), F.linear(seen, values, bias.double()))
            rounding = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[dtype]
            assert error <= rounding, (dtype, m, error)


@pytest.mark.parametrize("act", ACTS)
def test_dynamic_agrees_with_the_reference(act: str) -> None:
    for name in ("int8", "int4"):
        w = tiled(Spec(name, (1, 64), act=ACTS[act]), (48, 256))
        for x in (randn(6, 256), randn(6, 256).abs(), -randn(6, 256).abs(), torch.zeros(6, 256)):
            expected = registry.kernels.get("reference_linear").fn(x, w, None)
            assert (served(x, w) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("act", ACTS)
def test_dynamic_special_values_stay_in_their_rows(act: str) -> None:
    w = tiled(Spec("int8", ROW, act=ACTS[act]), (40, 70))
    x = randn(7, 70)
    clean, dirty = served(x, w), x.clone()
    dirty[1, 5] = torch.nan
    out = served(dirty, w)
    others = [row for row in range(7) if row != 1]
    assert torch.equal(out[others], clean[others])
    assert bool(out[1].isnan().all())


# -- formats of others -------------------------------------------------------------------------------


def test_codebooks_of_any_values() -> None:
    reopen()
    formats = {
        "few": lut_dtype("few", [-3, -0.1, 0.2, 0.7, 5]),
        "exact": lut_dtype("exact", [v * 0.25 for v in range(-16, 16)]),
        "sixty": lut_dtype("sixty", [v**3 / 1000 for v in range(-30, 30)]),
        "hundred": lut_dtype("hundred", [v / 7 for v in range(-50, 50)]),
        "bytes": lut_dtype("bytes", [v**3 / 1e6 for v in range(-120, 136)]),
    }
    for name, fmt in formats.items():
        if registry.dtypes.local(name) is None:
            register(fmt)
        check(tiled(Spec(name, (1, 64)), (40, 200)), rows=(1, 4, 33))


def test_small_values_of_a_wide_table() -> None:
    """A posit's greatest value is 256 times the usual one: groups of small ones keep their digits."""
    sizes = [0.0625 * 2**i * part for i in range(7) for part in (1, 1.25, 1.5, 1.75)]
    wide = [*(-v for v in reversed(sizes)), 0.0, *sizes, -256.0, 256.0]
    if registry.dtypes.local("wide") is None:
        register(lut_dtype("wide", sorted(wide)))
    x = randn(40, 512)
    q = quantize_tensor(x, Spec("wide", ROW, layout="packed"), scale=torch.ones(40, 1))
    check(to_layout(q, "cpu_tiles"), rows=(1, 4, 33))


# -- who serves --------------------------------------------------------------------------------------


def test_refusals() -> None:
    spec = Spec("int4", (1, 32), layout="cpu_tiles")
    kernel = registry.kernels.get("cpu_tiles_linear")
    call = Call("linear", spec, (32, 64), (4, 64), torch.float32, "cpu")
    assert kernel.refuses(call) is None
    assert "float64" in str(kernel.refuses(replace(call, x_dtype=torch.float64)))
    assert "(N, K)" in str(kernel.refuses(replace(call, weight_shape=(2, 32, 64))))
    w = tiled(Spec("int4", (1, 32)), (32, 64))
    x = randn(4, 64).double()
    assert relative(F.linear(x, w), x @ values_of(w).t()) < 1e-12


def test_wrong_bias_raises() -> None:
    w = tiled(Spec("int4", (1, 32)), (32, 64))
    for bias in (randn(31), randn(32).bfloat16()):
        with pytest.raises(RuntimeError, match="bias"):
            F.linear(randn(4, 64), w, bias)
