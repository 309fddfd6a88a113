"""Large tensors in slabs: every element once, whole blocks, and the same bits as at once."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core.numerics import (
    affine,
    bits,
    choose_qparams,
    dequantize_affine,
    grid_shape,
    pack_bits,
    quantize_affine,
    slabs,
)
from ao_core.registry import registry

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
BLOCKS = st.lists(st.one_of(st.just(-1), st.integers(1, 5)), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB", 12)


@given(SHAPES, BLOCKS)
def test_slabs_cover_every_element_once_and_cut_no_block(shape, block):
    seen = torch.zeros(shape, dtype=torch.int)
    owner = torch.arange(prod(grid_shape(shape, block))).reshape(grid_shape(shape, block))
    whole = affine.split_blocks(torch.zeros(shape), block, owner)
    owners = torch.broadcast_to(whole[1], whole[0].shape).reshape(shape)
    for part, grid in slabs.slabs(shape, block):
        seen[part] += 1
        piece = seen[part]
        # the grid of the slab is what its elements belong to, in the same places
        x, by = affine.split_blocks(torch.zeros(piece.shape), block, owner[grid])
        assert torch.equal(torch.broadcast_to(by, x.shape).reshape(piece.shape), owners[part])
    assert torch.equal(seen, torch.ones_like(seen))


@given(SHAPES)
def test_slabs_are_small_where_blocks_are(shape):
    sizes = [torch.zeros(shape)[part].numel() for part, _ in slabs.slabs(shape, (1,))]
    assert max(sizes) <= 12
    assert len(sizes) == 1 or max(sizes) * 2 > min(12, shape[-1])


@pytest.mark.parametrize("shape", [(37,), (5, 9), (3, 7, 11), (2, 1, 40)])
@pytest.mark.parametrize("block", [(1, -1), (-1, -1), (1, 4), (3, 4), (4,)], ids=str)
@pytest.mark.parametrize("name", ["uint4", "nf4", "f8e4m3"])
def test_same_codes_as_at_once(monkeypatch, shape, block, name):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dtype = registry.dtypes.get(name)
    zero_point = "int" if name == "uint4" else "none"
    scale, point = choose_qparams(x, dtype, block, zero_point)
    calls = []
    real = affine._quantize_affine
    monkeypatch.setattr(affine, "_quantize_affine", lambda *a: calls.append(0) or real(*a))
    codes = quantize_affine(x, dtype, block, scale, point)
    assert len(calls) > 1
    assert torch.equal(codes, real(x, dtype, block, scale, point, is_offset=False))
    dense = dequantize_affine(codes, dtype, block, scale, point, torch.bfloat16)
    at_once = affine._dequantize_affine(
        codes, dtype, block, scale, point, torch.bfloat16, is_offset=False
    )
    assert torch.equal(dense, at_once)


@pytest.mark.parametrize("width", range(1, 8))
@pytest.mark.parametrize("shape", [(101,), (7, 5), (3, 4, 21), (2, 30)])
def test_same_bytes_as_at_once(shape, width):
    codes = torch.randint(1 << width, shape, generator=torch.Generator().manual_seed(0))
    codes = codes.to(torch.uint8)
    assert slabs.is_large(codes)
    assert torch.equal(pack_bits(codes, width), bits._pack(codes, width))


def test_gradients_of_the_scale_flow_through_a_large_tensor():
    codes = torch.full((5, 9), 3, dtype=torch.uint8)
    scale = torch.ones(5, 1, requires_grad=True)
    dequantize_affine(codes, registry.dtypes.get("uint4"), (1, -1), scale).sum().backward()
    assert scale.grad.tolist() == [[27.0]] * 5


def test_what_has_no_values_is_not_cut():
    assert not slabs.is_large(torch.empty(100, device="meta"))
    seen = []

    def program(x):
        seen.append(slabs.is_large(x))
        return x + 1

    torch.compile(program, backend="eager", fullgraph=True)(torch.zeros(100))
    assert seen == [False]
