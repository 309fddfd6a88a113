"""The models of PTX instructions, against what the instructions are defined to do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ao_triton_checks.asm import run

RNG = np.random.default_rng(0)
A, B, C = (RNG.integers(0, 1 << 32, 4096, dtype=np.uint32) for _ in range(3))


def one(statement, *inputs):
    (result,) = run(statement, *inputs)
    return result


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("0xea", (A & B) | C),
        ("0x6a", (A & B) ^ C),
        ("0x96", A ^ B ^ C),
        ("0x35", ~((A & B) | (~A & C))),
    ],
)
def test_lop3(table, expected):
    assert np.array_equal(one(f"lop3.b32 $0, $1, $2, $3, {table};", A, B, C), expected)


def test_shifts_and_moves():
    text = "{ .reg .b32 t; mov.b32 t, 0x10; shr.u32 $0, $1, 4; shl.b32 t, $0, t; mov.b32 $0, t; }"
    assert np.array_equal(one(text, A), (A >> 4) << 16)


def test_prmt():
    bytes_ = np.stack([A, B], -1).view(np.uint8)
    expected = bytes_[:, [5, 0, 7, 2]].copy().view(np.uint32)[:, 0]
    assert np.array_equal(one("prmt.b32 $0, $1, $2, 0x2705;", A, B), expected)
    signs = np.where(bytes_[:, [4, 3]] >= 128, 255, 0).astype(np.uint32)
    expected = signs[:, 0] | signs[:, 1] << 8 | bytes_[:, 1].astype(np.uint32) * 0x01010000
    assert np.array_equal(one("prmt.b32 $0, $1, $2, 0x11bc;", A, B), expected)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_fma_rounds_once(kind):
    """Small integers times powers of two: the sum is exact in float64, and needs rounding here."""
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    values = RNG.integers(-2000, 2000, (3, 4096, 2)).astype(np.float64)
    values[1] = 2.0 ** RNG.integers(-4, 4, (4096, 2))
    numbers = values.astype(dtype)
    words = np.ascontiguousarray(numbers).view(np.uint32)[..., 0]
    exact = numbers[0].astype(np.float64) * numbers[1].astype(np.float64)
    exact = exact + numbers[2].astype(np.float64)
    expected = np.ascontiguousarray(exact.astype(np.float32).astype(dtype)).view(np.uint32)[..., 0]
    assert np.array_equal(one(f"fma.rn.{kind}x2 $0, $1, $2, $3;", *words), expected)


def test_what_is_not_modelled_raises():
    with pytest.raises(NotImplementedError, match=r"no model of 'sin\.approx"):
        run("sin.approx.f32 $0, $1;", A)
    with pytest.raises(KeyError):
        run("shr.u32 $0, t, 4; mov.b32 $0, $1;", A)
    # 2**60 + 2**-6 has more bits than a float64
    big, small = np.uint32(0x5D80), np.uint32(0x3C80)
    with pytest.raises(NotImplementedError, match="float64"):
        run("fma.rn.bf16x2 $0, $1, $1, $2;", np.array([big]), np.array([small]))
