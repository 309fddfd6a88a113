"""The references of `write_tail` and `encode_tokens`, by their trials."""

from __future__ import annotations

import torch

from ao_core.ext.kernels import write_tail
from ao_core.testing import KernelSuite


class TestReference(KernelSuite):
    kernel = "reference_write_tail"


class TestEncodeReference(KernelSuite):
    kernel = "reference_encode_tokens"


def test_gradients_do_not_reach_the_tail() -> None:
    tails, counts = torch.zeros(2, 1, 1, 4, 3), torch.zeros(2, dtype=torch.int64)
    key, value = torch.ones(2, 1, 1, 2, 3, requires_grad=True)
    write_tail(counts, tails[0], tails[1], key, value)
    assert not tails.requires_grad
    assert tails.sum() == 12
    assert counts.tolist() == [2, 0]
