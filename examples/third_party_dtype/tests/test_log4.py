"""The format passes the suites that ao ships, and does what it was made for."""

from __future__ import annotations

import torch

from ao_core import Spec, quantize_tensor
from ao_core.testing import DTypeSuite


class TestLog4(DTypeSuite):
    dtype = "log4"


def test_powers_of_the_square_root_of_two_are_exact() -> None:
    x = torch.tensor([[1.0, -0.5, 0.25, -(2.0**-0.5), 0.0, 2.0**-2.5, 2.0**-3, -(2.0**-3.5)]])
    q = quantize_tensor(x, Spec("log4", (1, 8), layout="packed"))
    assert torch.equal(q.dequantize(), x)
    assert q.qdata.numel() == 4  # two codes per byte
