"""The parts of `two_four`, read by other code than the layout's, and its sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ao_core
from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, QuantizationError, UnsupportedOp, registry

BF16 = Spec("bf16", (1, WHOLE), NO_SCALE, layout="two_four")


def spec(dtype, block=(1, WHOLE), scale="float32", zero_point="none"):
    return Spec(dtype, block, scale, zero_point, "two_four")


def two_of_four(row):
    """The row with the two of the greatest magnitude of every four, the first of equal ones, in Python."""
    out = [0.0] * len(row)
    for start in range(0, len(row), 4):
        places = range(start, min(start + 4, len(row)))
        for place in sorted(places, key=lambda i: (-abs(row[i]), i))[:2]:
            out[place] = row[place]
    return out


def read(q):
    """Values from the parts of a format without a scale, one group after the other."""
    (*_, k), groups = q.shape, -(-q.shape[-1] // 4)
    rows = []
    for values, index in zip(q.qdata.float().tolist(), q.index.tolist(), strict=True):
        assert len(values) == 2 * groups
        assert len(index) == -(-groups // 2)
        row = [0.0] * (4 * groups)
        for group in range(groups):
            places = index[group // 2] >> 4 * (group % 2) & 15
            first, second = places & 3, places >> 2
            assert first < second
            row[4 * group + first], row[4 * group + second] = values[2 * group : 2 * group + 2]
        if groups % 2:
            assert index[-1] >> 4 == 0b0100
        assert not any(row[k:])
        rows.append(row[:k])
    return rows


@given(st.integers(1, 5), st.integers(1, 41), st.integers(0, 2**31 - 1))
def test_keeps_the_two_greatest_of_four(rows, k, seed):
    x = np.random.default_rng(seed).integers(-3, 4, (rows, k)).astype(np.float32)
    q = quantize_tensor(torch.from_numpy(x).bfloat16(), BF16)
    expected = [two_of_four(row) for row in x.tolist()]
    assert read(q) == q.dequantize().tolist() == expected
    groups = q.dequantize()[:, : k // 4 * 4].reshape(rows, -1, 4)
    assert int(groups.count_nonzero(-1).amax() if groups.numel() else 0) <= 2


def test_the_bits():
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5, 0.0, 0.0, 0.0, -4.0, 5.0, 6.0]])
    q = quantize_tensor(x, BF16)
    assert q.qdata.tolist() == [[-2.0, 3.0, 0.0, -4.0, 5.0, 6.0]]
    # (1, 2) low and (0, 3) high; (0, 1) and padding
    assert q.index.tolist() == [[0b1100_1001, 0b0100_0100]]
    assert quantize_tensor(x, spec("int4")).qdata.shape == (1, 3)


@pytest.mark.parametrize(
    ("of", "bits"),
    [
        (BF16, 9.0),
        (Spec("fp32", (1, WHOLE), NO_SCALE, layout="two_four"), 17.0),
        (spec("int8", scale="bfloat16"), 5 + 16 / 512),
        (spec("f8e4m3"), 5 + 32 / 512),
        (spec("int4", (1, 128), "bfloat16"), 3 + 16 / 128),
        (spec("uint3", (1, 64), "float16", "int"), 2.5 + 24 / 64),
    ],
    ids=str,
)
def test_stored_bytes(of, bits):
    q = quantize_tensor(torch.randn(24, 512, generator=torch.Generator().manual_seed(0)), of)
    assert q.stored_bytes * 8 == bits * q.numel()
    assert q.sparsity == 0.5
    kept = q.dequantize().reshape(24, -1, 4).count_nonzero(-1)
    assert int(kept.amax()) == 2


def test_a_pattern_is_kept_to_the_bit():
    x = torch.randn(16, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    pruned = quantize_tensor(x, BF16).dequantize()
    assert not torch.equal(pruned, x)
    assert torch.equal(quantize_tensor(pruned, BF16).dequantize(), pruned)
    int8 = quantize_tensor(pruned, spec("int8")).dequantize()
    assert not int8[pruned == 0].any()


def test_zero_points_follow_what_stays():
    x = torch.tensor([[-1.0, 5.0, 6.0, 0.5, -0.5, 3.0, 0.0, 4.0]])
    q = quantize_tensor(x, spec("uint8", zero_point="int"))
    assert q.zero_point.tolist() == [[0]]  # nothing below 0 is left
    assert q.scale.tolist() == [[torch.tensor(6.0 / 255).item()]]


@given(st.integers(0, 9), st.integers(0, 9))
def test_slices_of_columns_begin_at_a_byte_of_the_index(start, end):
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(2))
    q = quantize_tensor(x, spec("int4", (1, 8)))
    start, end = 8 * min(start, end), min(8 * max(start, end) + 3, 70)
    assert torch.equal(q[:, start:end].dequantize(), q.dequantize()[:, start:end])
    with pytest.raises(UnsupportedOp, match="two_four"):
        q[:, 4:]


@pytest.mark.parametrize(
    ("dtype", "zero_point", "reason"),
    [
        ("uint4", "float", "zero_point='none' or 'int'"),
        ("uint4", "offset", "zero_point='none' or 'int'"),
    ],
)
def test_zero_points_that_move_zero_are_refused(dtype, zero_point, reason):
    with pytest.raises(QuantizationError, match=reason):
        quantize_tensor(torch.ones(4, 8), spec(dtype, zero_point=zero_point))


def test_formats_without_a_zero_are_refused(monkeypatch):
    without = ao_core.lut_dtype("without_zero", [-1.0, 0.5, 1.0])
    honest = registry.dtypes.get
    monkeypatch.setattr(
        registry.dtypes, "get", lambda name: without if name == without.name else honest(name)
    )
    with pytest.raises(QuantizationError, match="has no code for it"):
        quantize_tensor(torch.ones(4, 8), spec("without_zero"))
