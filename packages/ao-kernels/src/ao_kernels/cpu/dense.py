"""The kernel of `dense_linear`: rows that do not depend on each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel
from ao_kernels.cpu.library import isa, unavailable, want_alone
from ao_kernels.cpu.quantize import ELEMENTS

__all__ = ["DENSE_KERNELS"]


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One call into C++."""
    return torch.ops.ao_kernels.dense_linear.default(x, weight, bias)  # type: ignore[no-any-return]


def _refuses(call: Any) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.dtype}"
    return None


DENSE_KERNELS = (
    Kernel(
        "cpu_dense_linear", "dense_linear", "dense", "cpu", dense_linear, 50, unavailable, _refuses,
        lambda call: f"{isa()}, every row alone", alone=want_alone,
    ),
)  # fmt: skip
