"""Which blocks the kernel transforms, and how; its numbers are in proofs/interpreted."""

from __future__ import annotations

import pytest
import torch

from ao_core import Call
from ao_core.ext import registry
from ao_core.ext.kernels import hadamard_spec
from ao_kernels.triton.hadamard.op import launch_shape


def reason(block, dtype=torch.bfloat16):
    kernel = registry.kernels.get("triton_hadamard")
    shape = (3, 2 * block)
    call = Call("hadamard", hadamard_spec(block), shape, shape, dtype, "cuda")
    found = kernel.refuses(call)
    assert found is not None or kernel.describe(call)
    return found


@pytest.mark.parametrize("block", [1, 2, 16, 128, 4096, 16384, 192, 3072, 5120, 14336])
def test_what_is_taken(block):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert reason(block, dtype) is None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (32768, "16384 elements of a block at most, found 32768"),
        (11008, "order 64 at most besides powers of two, found 344"),
        (144 * 16, "one matrix of order 64 at most besides powers of two, found 12 × 12"),
        (12, "by 16 columns at least, found 1"),
        (28 * 1024, "16384 elements of a block at most, found 32768"),
    ],
)
def test_what_is_refused(block, words):
    assert words in reason(block)


def test_dtypes_that_are_refused():
    assert "not torch.float64" in reason(64, torch.float64)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (1, (2048, 1, 1, 1, 0, 2)),
        (64, (32, 1, 1, 64, 6, 2)),
        (4096, (1, 1, 1, 4096, 12, 4)),
        (16384, (1, 1, 1, 16384, 14, 16)),
        (192, (1, 12, 16, 16, 4, 2)),
        (14336, (1, 28, 32, 512, 9, 8)),
    ],
)
def test_blocks_of_threads(block, shape):
    assert launch_shape(block) == shape
