"""What the kernels of 2:4 sparsity say where they cannot serve; their numbers are in proofs/interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, registry
from ao_kernels.triton.sparsify.op import PICK, sparsify24, sparsify24_both, tile_mask
from ao_triton_checks.asm import run

QUANTIZE = registry.kernels.get("triton_quantize_two_four")
TILE_MASK = registry.kernels.get("triton_tile_mask")


def call(name="bf16", shape=(40, 300), dtype=torch.bfloat16):
    spec = Spec(name, (1, WHOLE), NO_SCALE, layout="two_four")
    return Call("quantize", spec, shape, shape, dtype, "cuda")


def test_calls():
    assert QUANTIZE.refuses(call()) is None
    assert QUANTIZE.refuses(call("fp16", (2, 3, 40), torch.float16)) is None
    assert "not fp32" in QUANTIZE.refuses(call("fp32", dtype=torch.float32))
    assert "torch.float32, not as bf16" in QUANTIZE.refuses(call(dtype=torch.float32))
    assert "(0, 4)" in QUANTIZE.refuses(call(shape=(0, 4)))
    assert TILE_MASK.refuses(call()) is None
    assert "float32" in TILE_MASK.refuses(call(dtype=torch.float32))
    assert "(2, 3, 4)" in TILE_MASK.refuses(call(shape=(2, 3, 4)))
    assert "(0, 4)" in TILE_MASK.refuses(call(shape=(0, 4)))


def test_any_two_of_four():
    """`PICK` with the selector that the kernels make of both places."""
    words = np.array([[0x1111_0000, 0x3333_2222]], np.uint32)
    for first in range(4):
        for second in range(first + 1, 4):
            selector = np.array([first * 0x22 + (second * 4 * 0x880 + 0x1010)], np.uint32)
            (found,) = run(PICK, words[:, 0], words[:, 1], selector)
            assert found == 0x1111 * first | 0x1111 * second << 16


@pytest.mark.parametrize(
    ("shape", "padded"), [((140, 300), (160, 320, 320, 192)), ((64, 32), (64, 64, 32, 64))]
)
def test_the_ops_know_their_results_without_running(shape, padded):
    rows, cols, rows_t, cols_t = padded
    n, k = shape
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(shape, dtype=torch.bfloat16)
        values, index = sparsify24(x)
        assert (values.shape, index.shape) == ((n, k // 2), (n, -(-k // 8)))
        assert (values.dtype, index.dtype) == (torch.bfloat16, torch.uint8)
        values, meta, values_t, meta_t, bits = sparsify24_both(x, "cutlass")
        assert (values.shape, meta.shape) == ((rows, cols // 2), (rows, 2, cols // 32))
        assert (values_t.shape, meta_t.shape) == ((rows_t, cols_t // 2), (rows_t, 2, cols_t // 32))
        assert meta.stride() == (2, 1, 2 * rows)
        assert bits.shape == (rows // 8, cols // 8, 8)
        assert (tile_mask(x).shape, tile_mask(x).dtype) == (shape, torch.bool)
