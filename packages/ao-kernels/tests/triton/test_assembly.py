"""The assembly of the Triton kernels: every word there is, through the text that the kernels hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ao_kernels.testing.asm import run
from ao_kernels.triton.assembly import nibbles


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_nibbles(element):
    """Every 16-bit word, in either half of a register beside every other kind of word."""
    dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    low = np.arange(1 << 16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(low)
    planes = run(nibbles(element), low | high << np.uint32(16))
    assert len(planes) == 4
    for j, plane in enumerate(planes):
        numbers = np.ascontiguousarray(plane).view(np.uint16).view(dtype).reshape(-1, 2)
        for half, words in enumerate((low, high)):
            expected = (words >> np.uint32(4 * j) & np.uint32(15)).astype(np.float64) - 8
            assert np.array_equal(numbers[:, half].astype(np.float64), expected)
