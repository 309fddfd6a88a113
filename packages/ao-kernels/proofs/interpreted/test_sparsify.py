"""2:4 sparsity in Triton's interpreter, on ragged shapes, bit for bit that of the references."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from ao_core.ext import ConfigError, UnsupportedOp
from ao_core.testing.base import gaussian
from ao_kernels.triton.sparsify.op import sparsify24, sparsify24_both, tile_mask

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PAIRS = list(combinations(range(4), 2))
#: every way to keep two in each row and column of a tile, as four pairs
PATTERNS = [
    rows
    for rows in product(PAIRS, repeat=4)
    if all(sum(column in pair for pair in rows) == 2 for column in range(4))
]
#: less than a tile; ragged both ways; rows of whole words, and of more than a block
SHAPES = ((3, 5), (70, 131), (37, 300))


def hard(shape, dtype=torch.float16):
    """Ties, zeros, infinities and NaN among numbers of all sizes."""
    x = gaussian(shape) * torch.exp2(gaussian(shape, seed=1) * 3)
    x[0] = 1.0
    x[-1, ::2], x[-1, 1::2] = -0.0, 0.0
    if shape[0] > 8:
        x[2] = x[2].round()
        x[5, 3], x[6, 1], x[7, 0] = torch.inf, -torch.inf, torch.nan
        x[5, 0] = torch.nan
    return x.to(dtype)


def kept(x):
    """Places (…, groups, 2) of the two that stay of every four, and x padded."""
    padded = F.pad(x, (0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
    scores = padded.abs().nan_to_num(torch.inf, torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    greatest = torch.finfo(x.dtype).max
    return padded.clamp(-greatest, greatest), order[..., :2].sort().values


@pytest.mark.parametrize("shape", [(1, 1), *SHAPES])
def test_rows(shape):
    x = hard(shape)
    values, index = sparsify24(x)
    padded, places = kept(x)
    nibbles = places[..., 0] | places[..., 1] << 2
    nibbles = F.pad(nibbles, (0, nibbles.shape[1] % 2), value=0b0100)
    assert values.dtype == x.dtype
    assert torch.equal(
        values.view(torch.int16), padded.gather(2, places).flatten(1).view(torch.int16)
    )
    assert torch.equal(index, (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 128)])
def test_the_best_of_all_patterns(shape, dtype):
    """Two in each row and column, and no pattern has a greater sum."""
    x = hard(shape, dtype)
    n, k = shape
    mask = tile_mask(x)
    assert mask.shape == x.shape
    whole = F.pad(mask, (0, -k % 4, 0, -n % 4)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
    kept = whole.permute(0, 2, 1, 3)[: n // 4, : k // 4].reshape(-1, 4, 4)
    assert bool((kept.sum(1) == 2).all())
    assert bool((kept.sum(2) == 2).all())
    magnitude = x.double().abs().nan_to_num(2.0**124).clamp(max=2.0**124)
    tiles = F.pad(magnitude, (0, -k % 4, 0, -n % 4)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
    tiles = tiles.permute(0, 2, 1, 3).reshape(-1, 4, 4)
    sums = torch.stack(
        [sum(tiles[:, r, list(pair)].sum(1) for r, pair in enumerate(rows)) for rows in PATTERNS]
    )
    found = (tiles * whole.permute(0, 2, 1, 3).reshape(-1, 4, 4)).sum((1, 2))
    assert bool((found >= sums.amax(0) * (1 - 1e-6)).all())


def test_each_pattern_is_found():
    tiles = torch.zeros(len(PATTERNS), 4, 4)
    for tile, rows in zip(tiles, PATTERNS, strict=True):
        for r, pair in enumerate(rows):
            tile[r, list(pair)] = 1.0
    wide = tiles.permute(1, 0, 2).reshape(4, -1)
    noise = gaussian(wide.shape).clamp(-3, 3) * 0.05
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(tile_mask((wide + noise).to(dtype)), wide.bool())


def both_ways(x, mask):
    """Values and indices of a padded matrix, of which two of four stay, by torch."""
    n, k = x.shape
    _, meta = sparse_semi_structured_from_dense_cutlass(mask.half().contiguous())
    return x[mask].view(n, k // 2), meta


def blocked(meta, n, k):
    """The order of cuSPARSELt from that of CUTLASS: other places for pieces of 128 bytes."""
    pieces = meta.reshape(k // 64, 2, n // 128, 4, 64)
    return pieces.permute(0, 2, 1, 3, 4).reshape(-1)


def expected_bits(mask):
    """16 bits of each of the four tiles of 8 × 8, the first row in the lowest."""
    n, k = mask.shape
    tiles = mask.view(n // 8, 2, 4, k // 8, 2, 4).permute(0, 3, 1, 4, 2, 5)
    weights = 2 ** torch.arange(8)
    return (tiles.reshape(n // 8, k // 8, 8, 8) * weights).sum(-1).to(torch.uint8)


@pytest.mark.parametrize("shape", [*SHAPES, (96, 64)])
def test_both_packs(shape):
    x = hard(shape)
    n, k = shape
    rows, cols, rows_t, cols_t = (-(-s // p) * p for s, p in ((n, 32), (k, 64), (k, 32), (n, 64)))
    values, meta, values_t, meta_t, bits = sparsify24_both(x, "cutlass")
    padded = F.pad(x, (0, cols - k, 0, cols_t - n))
    mask = torch.zeros(cols_t, cols, dtype=torch.bool)
    mask[:rows] = unpacked(bits, rows, cols)
    assert torch.equal(mask[:n, :k], tile_mask(x))
    # rows that belong to the transpose alone: all tiles of zeros are alike
    mask[rows:] = tile_mask(torch.zeros(4, 4).half()).repeat((cols_t - rows) // 4, cols // 4)
    for found, found_meta, dense, kept in (
        (values, meta, padded[:rows], mask[:rows]),
        (values_t, meta_t, padded.t()[:rows_t], mask.t()[:rows_t]),
    ):
        wanted, wanted_meta = both_ways(dense, kept)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
        assert found_meta.shape == (len(dense), 2, dense.shape[1] // 32)
        assert torch.equal(found_meta.permute(2, 0, 1).reshape(-1), wanted_meta.reshape(-1))


def unpacked(bits, rows, cols):
    """The mask that 16 bits per tile stand for."""
    words = bits.view(rows // 8, cols // 8, 2, 2, 2).to(torch.int64)
    each = words.unsqueeze(-1) >> torch.arange(8) & 1
    mask = (
        each.view(rows // 8, cols // 8, 2, 2, 4, 4)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(rows, cols)
        .bool()
    )
    assert torch.equal(expected_bits(mask), bits)
    return mask


def test_the_order_of_cusparselt():
    x = hard((128, 256))
    packed, none, packed_t, none_t, bits = sparsify24_both(x, "cusparselt")
    assert none.numel() == none_t.numel() == 0
    mask = unpacked(bits, 128, 256)
    for found, dense, kept in ((packed, x, mask), (packed_t, x.t(), mask.t())):
        wanted, meta = both_ways(dense, kept)
        n, k = dense.shape
        assert torch.equal(
            found[: n * k // 2].view(torch.int16), wanted.flatten().view(torch.int16)
        )
        indices = found[n * k // 2 :].view(torch.int16)
        assert torch.equal(indices, blocked(meta.reshape(-1), n, k))


def test_strided_and_misaligned_inputs():
    x = hard((40, 100))
    for view in (x.t(), x[:, 3:71], x[1::2, 4:92]):
        for found, wanted in zip(sparsify24(view), sparsify24(view.contiguous()), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(tile_mask(view), tile_mask(view.contiguous()))


def test_bad_input():
    with pytest.raises(UnsupportedOp, match=r"float32 of shape \(4, 4\)"):
        sparsify24(torch.ones(4, 4))
    with pytest.raises(UnsupportedOp, match=r"not empty"):
        tile_mask(torch.ones(0, 4).half())
    with pytest.raises(ConfigError, match="order='rows'"):
        sparsify24_both(torch.ones(4, 4).half(), "rows")
    with pytest.raises(UnsupportedOp, match=r"multiples of 128, found \(4, 4\)"):
        sparsify24_both(torch.ones(4, 4).half(), "cusparselt")


def test_custom_ops():
    x = gaussian((36, 68)).half()
    for op, args in (
        (torch.ops.ao_kernels.sparsify24, (x,)),
        (torch.ops.ao_kernels.sparsify24_both, (x, "cutlass")),
        (torch.ops.ao_kernels.tile_mask, (x,)),
    ):
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, results
