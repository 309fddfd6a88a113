"""What the kernels of 2:4 sparsity say where they cannot serve; their numbers are in proofs/interpreted."""

from __future__ import annotations

import numpy as np
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, registry
from ao_kernels.triton.sparsify.op import PICK
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
    assert TILE_MASK.refuses(call(dtype=torch.float32)) is None
    assert "float64" in TILE_MASK.refuses(call(dtype=torch.float64))
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
