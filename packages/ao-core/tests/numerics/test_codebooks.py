"""Learned codebooks against slow loops, scipy's k-means and the best quantizer of a normal distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.vq import kmeans2

from ao_core import WHOLE
from ao_core.dtypes import codebook_dtype
from ao_core.errors import ConfigError
from ao_core.numerics import (
    choose_qparams,
    decode_codebooks,
    dequantize_affine,
    encode_codebooks,
    full_block,
    grid_shape,
    learn_codebooks,
    quantize_affine,
    sqnr,
)

shapes = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)
blocks = st.lists(st.sampled_from([WHOLE, 1, 2, 3, 5]), min_size=1, max_size=3).map(tuple)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(shapes, blocks, st.integers(1, 4), st.integers(0, 1000))
def test_codes_are_the_nearest_values_of_the_block(shape, block, bits, seed):
    x = gaussian(*shape, seed=seed)
    tables = learn_codebooks(x, block, bits)
    assert tuple(tables.shape) == (*grid_shape(shape, block), 1 << bits)
    assert bool((tables.diff(dim=-1) >= 0).all())
    codes = encode_codebooks(x, block, tables)
    values = decode_codebooks(codes, block, tables)
    assert (codes.dtype, codes.shape, values.dtype) == (torch.uint8, x.shape, torch.float32)
    extents = full_block(block, shape)
    for index in itertools.product(*map(range, shape)):
        place = tuple(
            min(i // extent, size - 1)
            for i, extent, size in zip(index, extents, tables.shape, strict=False)
        )
        table = tables[place]
        assert values[index] == table[int(codes[index])]
        best = float((table - x[index]).abs().min())
        assert float((values[index] - x[index]).abs()) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(("bits", "decibels"), [(1, 4.40), (2, 9.30), (3, 14.62), (4, 20.22)])
def test_a_normal_distribution_gets_its_best_quantizer(bits: int, decibels: float):
    """Max, "Quantizing for Minimum Distortion" (1960), table I."""
    x = gaussian(256, 512)
    tables = learn_codebooks(x, (WHOLE, WHOLE), bits)
    values = decode_codebooks(encode_codebooks(x, (WHOLE, WHOLE), tables), (WHOLE, WHOLE), tables)
    assert float(sqnr(x, values)) == pytest.approx(decibels, abs=0.05)


def test_as_good_as_scipy_on_what_is_not_normal():
    x = torch.cat([gaussian(300) * 0.1 - 1, gaussian(200, seed=1) ** 3, gaussian(12) + 9])
    table = learn_codebooks(x, (WHOLE,), 3)
    start = table[0].double().numpy()[:, None]
    best, _ = kmeans2(x.double().numpy()[:, None], start, iter=100, minit="matrix", missing="warn")
    ours, theirs = (
        float(
            (x.double()[:, None] - torch.as_tensor(t).reshape(1, -1)).abs().amin(1).square().sum()
        )
        for t in (table[0].double(), best)
    )
    assert theirs <= ours <= theirs * 1.02


def test_few_different_values_are_exact():
    values = torch.tensor([-3.0, -0.25, 0.0, 7.0])
    x = values[torch.randint(0, 4, (5, 60), generator=torch.Generator().manual_seed(0))]
    tables = learn_codebooks(x, (1, WHOLE), 3)
    torch.testing.assert_close(
        decode_codebooks(encode_codebooks(x, (1, WHOLE), tables), (1, WHOLE), tables), x
    )
    same = learn_codebooks(torch.full((2, 8), 5.0), (1, WHOLE), 2)
    assert torch.equal(same, torch.full((2, 4), 5.0).reshape(2, 1, 4))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e38])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
def test_any_size_of_weights(size: float, scale_dtype: str):
    dtype, x = codebook_dtype("mine", 4), gaussian(6, 70).clamp(-3, 3) * size
    tables, zero_point = choose_qparams(x, dtype, (1, WHOLE), scale_dtype=scale_dtype)
    assert zero_point is None
    assert bool(tables.float().isfinite().all())
    values = dequantize_affine(
        quantize_affine(x, dtype, (1, WHOLE), tables), dtype, (1, WHOLE), tables
    )
    assert bool(values.isfinite().all())
    if scale_dtype != "float16" or size == 1.0:
        assert 18 < float(sqnr(x, values)) < 27


def test_zeros_nan_and_one_block_beside_it():
    x = gaussian(3, 40)
    x[0] = 0
    x[1, 5] = torch.nan
    tables = learn_codebooks(x, (1, WHOLE), 2)
    assert torch.equal(tables[0], torch.zeros(1, 4))
    assert bool(tables[1].isnan().all())
    assert torch.equal(tables[2:], learn_codebooks(x[2:], (1, WHOLE), 2))


def test_zero_points_and_other_scales_are_refused():
    dtype, x = codebook_dtype("mine", 3), gaussian(2, 8)
    for zero_point, scale_dtype in (("float", "float32"), ("none", "e8m0"), ("none", "e4m3")):
        with pytest.raises(
            ConfigError, match="mine has learned values in place of scales; use zero_point="
        ):
            choose_qparams(x, dtype, (1, WHOLE), zero_point, scale_dtype)
    for bits in (0, 9):
        with pytest.raises(ConfigError, match=f"bits={bits}: a codebook has 1 to 8 bits"):
            codebook_dtype("mine", bits)


def test_the_table_is_the_one_that_is_stored():
    """Codes are chosen among the values as rounded, so that none is farther than another."""
    dtype, x = codebook_dtype("mine", 6), gaussian(4, 300)
    tables, _ = choose_qparams(x, dtype, (1, WHOLE), scale_dtype="bfloat16")
    assert tables.dtype == torch.bfloat16
    codes = quantize_affine(x, dtype, (1, WHOLE), tables)
    distance = (x[..., None].double() - tables.double()).abs()
    chosen = distance.gather(-1, codes.long()[..., None])[..., 0]
    np.testing.assert_allclose(chosen, distance.amin(-1), atol=1e-7)


def test_large_tensors_are_learned_from_in_pieces(monkeypatch):
    x = gaussian(9, 5, 40)
    whole = [
        learn_codebooks(x, block, 3) for block in ((1, 1, WHOLE), (1, 2, 16), (1, WHOLE, WHOLE))
    ]
    monkeypatch.setattr("ao_core.numerics.codebooks._CHUNK", 450)
    pieces = [
        learn_codebooks(x, block, 3) for block in ((1, 1, WHOLE), (1, 2, 16), (1, WHOLE, WHOLE))
    ]
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a, b)
